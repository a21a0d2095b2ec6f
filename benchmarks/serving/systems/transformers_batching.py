"""`transformers` with its continuous batching, stateless, on the same GPU, for those with nothing else."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.clock import RunClock
from benchmarks.serving.systems.base import (
    Ended,
    Event,
    FirstToken,
    ServingError,
    SystemFacts,
    SystemUnavailableError,
    TurnRequest,
)
from benchmarks.serving.systems.vllm_engine import counts_of, gpu_memory_in_use

PAGE_TOKENS = 256
"""Its own default."""
NO_TOKEN = -1
"""Given as the end token: no token has this id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSettings:
    """What it is given."""

    model: Mapping[str, Any] | Path
    """Fields of config.json, for random weights; or a checkpoint's folder."""
    dtype: str
    kv_bytes: int
    kv_bytes_per_token: int
    step_tokens: int
    attention: str = "paged|sdpa"
    """Runs without further packages; a flash-attention package makes it faster."""


class TransformersSystem:
    """A model whose continuous batching runs in a thread of its own."""

    def __init__(self, settings: TransformersSettings, clock: RunClock) -> None:
        """Args:
        settings: model and budgets.
        clock: the driver's.

        Raises:
            SystemUnavailableError: torch isn't installed.
        """
        try:
            torch = importlib.import_module("torch")
        except ImportError as error:
            raise SystemUnavailableError(f"transformers: torch can't be imported here: {error}") from error
        transformers = importlib.import_module("transformers")
        configuration = importlib.import_module("transformers.generation.configuration_utils")
        self._torch, self._clock = torch, clock
        model = _load(torch, transformers, settings)
        model.set_attn_implementation(settings.attention)
        generation = transformers.GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0)
        batching = configuration.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=settings.kv_bytes // (settings.kv_bytes_per_token * PAGE_TOKENS),
            max_batch_tokens=settings.step_tokens,
            allow_block_sharing=False,
        )
        self._manager = model.init_continuous_batching(generation, batching)
        self._manager.start()
        self.facts = SystemFacts(
            name="transformers",
            versions={"transformers": transformers.__version__, "torch": torch.__version__},
            settings={"attention": settings.attention, "step_tokens": settings.step_tokens},
            tells_tiers=True,
        )
        self._pending: dict[str, tuple[str, int, int]] = {}
        """Request id -> conversation, tokens of the prompt, of the history."""
        self._silent: set[str] = set()
        self._next_id = 0

    def warm_up(self) -> None:
        """Answer one prompt."""
        self.submit(
            TurnRequest(conversation_id="warm-up", turn=0, new=np.full(200, 5, np.int32), output_tokens=64)
        )
        while self._pending:
            self.poll(1.0)

    def submit(self, request: TurnRequest) -> None:
        """See `System.submit`."""
        prompt = request.prompt()
        name = f"r{self._next_id}"
        self._next_id += 1
        self._pending[name] = (request.conversation_id, len(prompt), len(prompt) - len(request.new))
        self._silent.add(name)
        self._manager.add_request(
            prompt.tolist(),
            request_id=name,
            max_new_tokens=request.output_tokens,
            eos_token_id=NO_TOKEN,
            streaming=True,
        )

    def poll(self, timeout_s: float) -> Sequence[Event]:
        """See `System.poll`."""
        events: list[Event] = []
        wait_s = max(timeout_s, 1e-3)
        while (output := self._manager.get_result(timeout=wait_s)) is not None:
            wait_s = 1e-6
            events.extend(self._events_of(output))
        return events

    def settle(self) -> None:
        """Nothing goes on behind answers."""

    def reset(self) -> None:
        """See `System.reset`. Nothing is kept between turns, so only what runs is broken off."""
        for name in self._pending:
            self._manager.cancel_request(name)
        self._pending.clear()
        self._silent.clear()

    def counters(self) -> Mapping[str, float]:
        """None are read."""
        return {}

    def memory_bytes(self) -> int | None:
        """See `System.memory_bytes`."""
        if not self._torch.cuda.is_available():
            return None
        return gpu_memory_in_use()

    def close(self) -> None:
        """See `System.close`."""
        self._manager.stop(block=True)

    def _events_of(self, output: Any) -> list[Event]:
        if output.request_id not in self._pending:  # it was cancelled
            return []
        if output.error:
            raise ServingError(f"transformers: {output.error}")
        now_s, events = self._clock(), []
        conversation, prompt, history = self._pending[output.request_id]
        if output.generated_tokens and output.request_id in self._silent:
            self._silent.remove(output.request_id)
            events.append(FirstToken(conversation_id=conversation, time_s=now_s))
        if output.is_finished():
            del self._pending[output.request_id]
            events.append(
                Ended(
                    conversation_id=conversation,
                    time_s=now_s,
                    output=np.asarray(output.generated_tokens, np.int32),
                    counts=counts_of(prompt=prompt, history=history, cached=0),
                )
            )
        return events


def _load(torch: Any, transformers: Any, settings: TransformersSettings) -> Any:
    """The model on the GPU, or on the CPU where there is none."""
    dtype = getattr(torch, settings.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(settings.model, Path):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
        return loaded.to(device).eval()
    kind = settings.model["model_type"]
    fields = {key: value for key, value in settings.model.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **fields)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
