"""vLLM in process, where it is installed: stateless, with prefix caching, or with its CPU offloading.

Tokens go in and out as ids; the history is sent again at every turn, as its API has it.
"""

import importlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.clock import RunClock
from benchmarks.serving.systems.base import (
    ContextCounts,
    Ended,
    Event,
    FirstToken,
    RefusedError,
    SystemFacts,
    SystemUnavailableError,
    TurnRequest,
)

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "vllm-stateless": {"enable_prefix_caching": False},
    "vllm-prefix": {"enable_prefix_caching": True},
    "vllm-offload": {"enable_prefix_caching": True, "kv_offloading_backend": "native"},
}
"""Name -> what differs."""
CAPTURE_STEP, SMALL_CAPTURES = 8, (1, 2, 4)
"""Batch sizes with CUDA graphs: small powers, then every eighth as far as 128, then every 32nd; as measured
best for the anchors of this comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What vLLM is given; the same budgets as every other system.

    See docs/fairness.md for what stands behind each.
    """

    model: Mapping[str, Any] | Path
    """Fields of config.json, for random weights; or a checkpoint's folder."""
    dtype: str
    kv_bytes: int
    """Device memory for KV, on each device."""
    host_bytes: int
    """Host memory for KV; used by `vllm-offload` alone."""
    max_context_tokens: int
    max_rows: int
    """Requests that run at once."""
    page_tokens: int = 32
    num_shards: int = 1


class VllmSystem:
    """An `LLMEngine` whose steps the driver runs."""

    def __init__(self, name: str, settings: VllmSettings, clock: RunClock, folder: Path) -> None:
        """Args:
        name: one of `VARIANTS`.
        settings: model and budgets.
        clock: the driver's.
        folder: where config.json may be written for random weights.

        Raises:
            SystemUnavailableError: vLLM isn't installed.
        """
        try:
            vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise SystemUnavailableError(f"{name}: vLLM can't be imported here: {error}") from error
        arguments = engine_arguments(name, settings, folder)
        self._params = vllm.SamplingParams
        self._delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._llm = vllm.LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._clock = clock
        self.facts = SystemFacts(
            name=name,
            versions={"vllm": vllm.__version__, "torch": importlib.import_module("torch").__version__},
            settings={key: value for key, value in arguments.items() if key != "model"},
            tells_tiers=name != "vllm-offload",
        )
        self._salt = 0
        """Part of every block's hash, so that no run finds what an earlier one has left in any tier."""
        self._pending: dict[str, _Pending] = {}
        """By request id."""
        self._next_id = 0

    def warm_up(self) -> None:
        """Run prompts and decoding once, so that nothing is compiled or loaded while turns are measured."""
        rng = np.random.default_rng(0)
        for length in (300, 300, 4096, 4096):
            new = rng.integers(3, 32_000, size=length).astype(np.int32)
            self.submit(
                TurnRequest(conversation_id=str(len(self._pending)), turn=0, new=new, output_tokens=8)
            )
        while self._pending:
            self.poll(0)
        self.reset()

    def submit(self, request: TurnRequest) -> None:
        """See `System.submit`."""
        prompt = request.prompt()
        name = f"{self._next_id}"
        self._next_id += 1
        params = self._params(
            temperature=0.0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._delta,
        )
        try:
            given = {"prompt_token_ids": prompt.tolist(), "cache_salt": f"run {self._salt}"}
            self._engine.add_request(name, given, params)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        self._pending[name] = _Pending(request.conversation_id, len(prompt), len(prompt) - len(request.new))

    def poll(self, timeout_s: float) -> Sequence[Event]:
        """One step, and what it brought."""
        events: list[Event] = []
        outputs = self._engine.step()
        now_s = self._clock()
        for output in outputs:
            pending = self._pending[output.request_id]
            tokens = output.outputs[0].token_ids
            if len(tokens) and not pending.output:
                events.append(FirstToken(conversation_id=pending.conversation_id, time_s=now_s))
            pending.output.extend(tokens)
            pending.cached = max(pending.cached, output.num_cached_tokens or 0)
            if output.finished:
                del self._pending[output.request_id]
                events.append(pending.ended(now_s))
        return events

    def settle(self) -> None:
        """Nothing goes on behind answers that it could be asked to finish."""

    def reset(self) -> None:
        """See `System.reset`."""
        if self._pending:
            self._engine.abort_request(list(self._pending))
            while self._engine.has_unfinished_requests():
                self._engine.step()
            self._pending.clear()
        self._salt += 1
        self._llm.reset_prefix_cache()  # only makes room: what stays can't be found any more

    def counters(self) -> Mapping[str, float]:
        """None are read."""
        return {}

    def memory_bytes(self) -> int | None:
        """What the driver says is in use: vLLM's worker is another process."""
        return gpu_memory_in_use()

    def close(self) -> None:
        """See `System.close`."""
        self._engine.engine_core.shutdown()


class _Pending:
    def __init__(self, conversation_id: str, prompt: int, history: int) -> None:
        self.conversation_id = conversation_id
        self.prompt = prompt
        self.history = history
        self.cached = 0
        self.output: list[int] = []

    def ended(self, now_s: float) -> Ended:
        return Ended(
            conversation_id=self.conversation_id,
            time_s=now_s,
            output=np.asarray(self.output, np.int32),
            counts=counts_of(prompt=self.prompt, history=self.history, cached=self.cached),
        )


def counts_of(*, prompt: int, history: int, cached: int) -> ContextCounts:
    """Counts of a system that only says how much of a prompt was cached.

    A history's last token was never computed before: no system has it cached.
    """
    known = max(0, history - 1)
    recomputed = max(0, known - cached)
    return ContextCounts(new=prompt - cached - recomputed, from_device=cached, recomputed=recomputed)


def engine_arguments(name: str, settings: VllmSettings, folder: Path) -> dict[str, Any]:
    """What `vllm.LLM` is called with."""
    arguments: dict[str, Any] = {
        "dtype": settings.dtype,
        "block_size": settings.page_tokens,
        "max_model_len": settings.max_context_tokens,
        "kv_cache_memory_bytes": settings.kv_bytes,
        "max_num_seqs": settings.max_rows,
        "tensor_parallel_size": settings.num_shards,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": 0,
        "compilation_config": {"cudagraph_capture_sizes": capture_sizes(settings.max_rows)},
        **VARIANTS[name],
    }
    if name == "vllm-offload":
        arguments["kv_offloading_size"] = settings.host_bytes / 2**30
    if isinstance(settings.model, Path):
        return arguments | {"model": str(settings.model)}
    folder.mkdir(parents=True, exist_ok=True)
    architecture = {"llama": "LlamaForCausalLM", "opt": "OPTForCausalLM"}[settings.model["model_type"]]
    fields = {"architectures": [architecture], "torch_dtype": settings.dtype, **settings.model}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return arguments | {"model": str(folder), "load_format": "dummy"}


def capture_sizes(max_rows: int) -> list[int]:
    """Batch sizes that get a CUDA graph, `max_rows` among them."""
    sizes = {
        *SMALL_CAPTURES,
        *range(CAPTURE_STEP, 129, CAPTURE_STEP),
        *range(160, max_rows + 1, 32),
        max_rows,
    }
    return sorted(size for size in sizes if size <= max_rows)


def gpu_memory_in_use() -> int | None:
    """Bytes in use on the first GPU, as its driver counts; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(done.stdout.split()[0]) * 2**20
