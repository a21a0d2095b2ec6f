"""Systems behind the one interface: the engine's variants, and adapters against stand-ins for the rest."""

import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import httpx2
import numpy as np
import pytest

from benchmarks.serving.clock import RunClock
from benchmarks.serving.compression import Tiers
from benchmarks.serving.driver import serve
from benchmarks.serving.models import ModelChoice
from benchmarks.serving.run import Opener, RunSettings, ServerSettings, run_once
from benchmarks.serving.systems import transformers_batching
from benchmarks.serving.systems.base import ServingError, SystemUnavailableError
from benchmarks.serving.systems.openai_server import OpenAIServerSystem
from benchmarks.serving.systems.pensieve import VARIANTS
from benchmarks.serving.systems.transformers_batching import TransformersSettings, TransformersSystem
from benchmarks.serving.systems.vllm_engine import (
    VllmSettings,
    VllmSystem,
    capture_sizes,
    counts_of,
    engine_arguments,
)
from benchmarks.workloads import WorkloadSettings, make_workload
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.simulator.synthetic import SyntheticWorkload

TINY = ModelChoice(name="tiny", dtype="float32")
PAGE_BYTES = 32 * TINY.kv_bytes_per_token


def few_turns(**changes):
    shape = SyntheticWorkload(mean_turns=3, mean_input_tokens=30, mean_output_tokens=6, sigma=0.5)
    values: dict = {
        "max_context_tokens": 250,
        "conversations": 6,
        "requests_per_s": 50.0,
        "think_time_s": 0.05,
        "vocab_size": 256,
    }
    return make_workload(WorkloadSettings(source="synthetic", synthetic=shape, **values | changes))


def settings(device_pages=40, host_pages=40, **changes):
    tiers = Tiers(device_bytes=device_pages * PAGE_BYTES, host_bytes=host_pages * PAGE_BYTES)
    return ServerSettings(tiers=tiers, step_tokens=32, max_rows=2, max_context_tokens=256, **changes)


@pytest.fixture(scope="module")
def opener():
    return Opener(TINY, settings())


def outputs_of(opener, name, workload):
    """Figures of two runs one after the other, and the tokens of the first."""
    clock = RunClock(skip_idle=True)
    with opener.open(name, clock) as system:
        seen = {}
        poll = system.poll

        def noting(timeout_s):
            events = poll(timeout_s)
            for event in events:
                if hasattr(event, "output"):
                    seen.setdefault(event.conversation_id, []).append(event.output.tolist())
            return events

        system.poll = noting
        run_settings = RunSettings(stop_s=1000.0, warm_up_s=0.0)
        first = run_once(system, workload, clock, run_settings)
        tokens = {name: answers[:] for name, answers in seen.items()}
        second = run_once(system, workload, clock, run_settings)
        return first, second, tokens


def test_variants_of_the_engine_give_the_same_tokens_and_differ_in_what_they_compute(opener):
    workload = few_turns()
    results = {name: outputs_of(opener, name, workload) for name in ("pensieve", "stateless")}
    kept, without = results["pensieve"], results["stateless"]
    assert kept[2] == without[2]
    assert sum(map(len, kept[2].values())) == workload.num_turns
    for first, second, _ in results.values():
        assert first["requests"] == second["requests"] == workload.num_turns
        # Nothing is left for the second run, or it would find more.
        assert first["history_tokens"] == second["history_tokens"] > 0
        assert first["new_tokens"] == second["new_tokens"]
    assert kept[0]["hit_rate"] == 1.0
    assert kept[0]["recomputed_tokens"] == 0
    assert without[0]["hit_rate"] == 0.0
    assert without[0]["recomputed_tokens"] == without[0]["history_tokens"] == kept[0]["history_tokens"]


def test_the_host_tier_is_used_or_left_out(opener):
    workload = few_turns(conversations=12, think_time_s=3.0, requests_per_s=4.0)
    for name in ("pensieve", "gpu-only"):
        clock = RunClock(skip_idle=True)
        with opener.open(name, clock, server=settings(device_pages=12)) as system:
            figures = run_once(system, workload, clock, RunSettings(stop_s=1000.0, warm_up_s=0.0))
        assert figures["recomputed_tokens"] > 0 or name == "pensieve"
        assert (figures["hit_rate_host"] > 0) == (name == "pensieve")
        assert (figures["chunks_swapped_out"] > 0) == (name == "pensieve")


def test_variants_differ_in_one_thing():
    whole = EngineConfig(tiers=TierConfig(device_pages=7, host_pages=9))
    tiers = {name: change(whole).tiers for name, change in VARIANTS.items()}
    assert tiers["pensieve"] == whole.tiers
    assert tiers["lru"] == replace(whole.tiers, policy="lru")
    assert tiers["separate"] == whole.tiers
    assert VARIANTS["separate"](whole).scheduler == replace(whole.scheduler, separate_phases=True)
    assert tiers["gpu-only"] == replace(whole.tiers, host_pages=0)
    assert tiers["stateless"] == replace(whole.tiers, keep_state=False, host_pages=0)


def test_unknown_system(opener):
    with pytest.raises(InvalidArgumentError, match="system: got 'triton', expected a URL or one of pensieve"):
        opener.open("triton", RunClock()).__enter__()


def test_counts_add_up_to_the_prompt():
    for prompt, history, cached in ((100, 0, 0), (100, 60, 0), (100, 60, 32), (100, 60, 59), (100, 60, 64)):
        counts = counts_of(prompt=prompt, history=history, cached=cached)
        assert counts.new + counts.from_device + counts.recomputed == prompt
        assert counts.from_device == cached
        assert min(counts.new, counts.recomputed) >= 0


# -- vLLM ----------------------------------------------------------------------------------------


class FakeVllmEngine:
    """Answers everything in one token a step; caches whole blocks of what it has seen."""

    def __init__(self, owner):
        self.owner, self.running, self.blocks = owner, {}, set()
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, name, prompt, params):
        ids, salt = prompt["prompt_token_ids"], prompt["cache_salt"]
        if len(ids) + params.max_tokens > 400:
            raise ValueError("too long")
        cached = 0
        if self.owner.arguments["enable_prefix_caching"]:
            while (salt, *ids[: cached + 32]) in self.blocks and cached + 32 < len(ids):
                cached += 32
        self.running[name] = [list(ids), params, cached, 0, salt]

    def step(self):
        outputs = []
        for name, entry in list(self.running.items()):
            ids, params, cached, done, salt = entry
            ids.append((sum(ids) * 31 + len(ids)) % 256)
            entry[3] = done + 1
            finished = entry[3] == params.max_tokens
            if finished:
                del self.running[name]
                self.blocks |= {(salt, *ids[: i + 32]) for i in range(0, len(ids) - 32, 32)}
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    outputs=[SimpleNamespace(token_ids=[ids[-1]])],
                    num_cached_tokens=cached,
                    finished=finished,
                )
            )
        return outputs

    def abort_request(self, names):
        for name in names:
            self.running.pop(name)

    def has_unfinished_requests(self):
        return bool(self.running)


class FakeLLM:
    made = None

    def __init__(self, **arguments):
        self.arguments = arguments
        self.llm_engine = FakeVllmEngine(self)
        FakeLLM.made = self

    def reset_prefix_cache(self):
        return False  # as where an offloading connector still has something to copy


@pytest.fixture
def fake_vllm(monkeypatch):
    module = ModuleType("vllm")
    module.__version__, module.LLM = "0.0", FakeLLM
    module.SamplingParams = SimpleNamespace
    params = ModuleType("vllm.sampling_params")
    params.RequestOutputKind = SimpleNamespace(DELTA=1)
    torch = ModuleType("torch")
    torch.__version__ = "0.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.setitem(sys.modules, "torch", torch)


def vllm_settings():
    return VllmSettings(
        model=TINY.config,
        dtype="bfloat16",
        kv_bytes=10**9,
        host_bytes=2**31,
        max_context_tokens=400,
        max_rows=16,
    )


def test_vllm_adapter(fake_vllm, tmp_path):
    workload = few_turns()
    for name, hits in (("vllm-stateless", False), ("vllm-prefix", True), ("vllm-offload", True)):
        clock = RunClock(skip_idle=True)
        system = VllmSystem(name, vllm_settings(), clock, tmp_path / name)
        figures = [
            run_once(system, workload, clock, RunSettings(stop_s=1000.0, warm_up_s=0.0)) for _ in range(2)
        ]
        assert figures[0]["requests"] == workload.num_turns
        assert (figures[0]["hit_rate"] > 0.3) == hits
        assert figures[0]["hit_rate"] == figures[1]["hit_rate"]
        assert np.isnan(figures[0]["hit_rate_device"]) == (name == "vllm-offload")
        assert FakeLLM.made.arguments["skip_tokenizer_init"]
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
    too_large = few_turns(max_context_tokens=2000, conversations=1)
    large = np.zeros(500, np.int32)
    given = too_large.conversations[0]
    turn = given.shape.turns[0]
    shape = type(given.shape)(id="x", turns=(type(turn)(input_tokens=500, output_tokens=3),))
    one = type(given)(shape=shape, inputs=(large,), answers=(np.zeros(3, np.int32),))
    assert serve(system, type(workload)(conversations=(one,), settings={}), clock).refused == 1


def test_vllm_gets_the_same_budgets(tmp_path):
    arguments = engine_arguments("vllm-offload", vllm_settings(), tmp_path)
    assert arguments["kv_cache_memory_bytes"] == 10**9
    assert arguments["kv_offloading_size"] == 2.0
    assert arguments["max_num_seqs"] == 16
    assert "kv_offloading_size" not in engine_arguments("vllm-prefix", vllm_settings(), tmp_path)
    assert capture_sizes(256) == [1, 2, 4, *range(8, 129, 8), 160, 192, 224, 256]
    assert capture_sizes(5) == [1, 2, 4, 5]


def test_vllm_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemUnavailableError, match="vLLM can't be imported here"):
        VllmSystem("vllm-prefix", vllm_settings(), RunClock(), tmp_path)


# -- transformers --------------------------------------------------------------------------------


class FakeManager:
    """Gives one more token of each request for every result that is asked for."""

    def __init__(self, config):
        self.config, self.running, self.stopped = config, {}, False

    def start(self):
        pass

    def add_request(self, ids, *, request_id, max_new_tokens, eos_token_id, streaming):
        assert streaming and eos_token_id == -1
        self.running[request_id] = (list(ids), max_new_tokens, [])

    def get_result(self, timeout):
        if not self.running or timeout < 1e-4:
            return None
        name = next(iter(self.running))
        ids, count, output = self.running.pop(name)
        output = [*output, (sum(ids) + len(output)) % 256]
        done = len(output) == count
        if not done:
            self.running[name] = (ids, count, output)
        return SimpleNamespace(request_id=name, generated_tokens=output, error=None, is_finished=lambda: done)

    def cancel_request(self, name):
        self.running.pop(name)

    def stop(self, block):
        self.stopped = block


class FakeModel:
    def set_attn_implementation(self, name):
        self.attention = name

    def init_continuous_batching(self, generation, batching):
        assert generation.do_sample is False
        self.manager = FakeManager(batching)
        return self.manager


def test_transformers_adapter(monkeypatch):
    torch = ModuleType("torch")
    torch.__version__, torch.cuda = "0.0", SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    model = FakeModel()
    monkeypatch.setattr(transformers_batching, "_load", lambda *_: model)
    clock = RunClock(skip_idle=True)
    given = TransformersSettings(
        model=TINY.config, dtype="bfloat16", kv_bytes=2**20, kv_bytes_per_token=256, step_tokens=512
    )
    system = TransformersSystem(given, clock)
    system.warm_up()
    assert (model.attention, model.manager.config.num_blocks) == ("paged|sdpa", 16)
    assert model.manager.config.allow_block_sharing is False
    workload = few_turns()
    figures = run_once(system, workload, clock, RunSettings(stop_s=1000.0, warm_up_s=0.0))
    assert figures["requests"] == workload.num_turns
    assert figures["hit_rate"] == 0.0
    assert figures["recomputed_tokens"] == figures["history_tokens"] > 0
    system.close()
    assert model.manager.stopped


def test_transformers_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    given = TransformersSettings(
        model=TINY.config, dtype="bfloat16", kv_bytes=2**20, kv_bytes_per_token=256, step_tokens=512
    )
    with pytest.raises(SystemUnavailableError, match="torch can't be imported here"):
        TransformersSystem(given, RunClock())


# -- a server over HTTP --------------------------------------------------------------------------


def server(request):
    if request.url.path == "/v1/models":
        return httpx2.Response(200, json={"data": [{"id": "m"}]})
    if request.url.path == "/version":
        return httpx2.Response(200, json={"version": "1.2"})
    body = json.loads(request.content)
    assert body["ignore_eos"] and body["stream"] and body["model"] == "m"
    assert body["cache_salt"].startswith("run ")
    if 13 in body["prompt"]:
        return httpx2.Response(400, text="bad token")
    first = sum(body["prompt"]) % 200 + 20
    chunks = [{"choices": [{"text": "", "token_ids": [first + i]}]} for i in range(body["max_tokens"])]
    chunks.append({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": None}}})
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return httpx2.Response(200, text=text, headers={"content-type": "text/event-stream"})


def test_openai_server_adapter():
    clock = RunClock(skip_idle=True)
    system = OpenAIServerSystem("http://there/v1", clock, transport=httpx2.MockTransport(server))
    try:
        assert system.facts.versions == {"server": "1.2"}
        workload = few_turns(conversations=4, vocab_size=12)
        figures = run_once(system, workload, clock, RunSettings(stop_s=1000.0, warm_up_s=0.0))
        assert figures["requests"] == workload.num_turns
        assert figures["hit_rate"] == 0.0
        assert np.isnan(figures["hit_rate_device"])
        with pytest.raises(ServingError, match="status 400: bad token"):
            serve(system, few_turns(conversations=4, vocab_size=250), clock)
    finally:
        system.close()


def test_openai_server_that_is_not_there():
    def refuse(request):
        raise httpx2.ConnectError("refused")

    with pytest.raises(SystemUnavailableError, match=r"http://there: ConnectError"):
        OpenAIServerSystem("http://there", RunClock(), transport=httpx2.MockTransport(refuse))
