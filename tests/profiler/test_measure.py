"""Measuring a profile: the arithmetic with made-up times, a tiny model, and who reads the file."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.profile import read_profile, write_profile
from pensieve_jax.engine import Engine
from pensieve_jax.models import abstract_model, make_model
from pensieve_jax.models.presets import PRESETS, preset, random_model
from pensieve_jax.models.shape import shape_of
from pensieve_jax.profiler import ProfileConfig, measure, measure_profile
from pensieve_jax.simulator import MODELS
from tests.tiny import TinyModel

KEPT = Path(__file__).parents[2] / "profiles"
SMALL = ProfileConfig(step_tokens=64, cost_rows=2, decode_rows=4, max_context_tokens=256, rounds=1)
STEP_S, TOKEN_S, PAIR_S, READ_S = 1e-3, 1e-5, 1e-7, 1e-6


class MadeUpTimer:
    """Steps that take a time for themselves, for each token, and for each pair or each token read."""

    noise = staticmethod(lambda: 0.0)

    def __init__(self, model, *, shapes, mesh, layered):
        self.shapes = shapes

    def step(self, rows):
        assert len(rows) <= self.shapes.max_rows
        for row in rows:
            assert row.kv_len <= len(row.page_ids) * self.shapes.page_tokens
            assert max(row.page_ids) < self.shapes.num_pages
        assert len({page for row in rows for page in row.page_ids}) == sum(len(row.page_ids) for row in rows)
        decoding = all(len(row.token_ids) == 1 for row in rows)
        attention = READ_S * sum(row.kv_len for row in rows) if decoding else PAIR_S * measure._pairs(rows)
        return STEP_S + TOKEN_S * sum(len(row.token_ids) for row in rows) + attention

    def link_rates(self, num_pages, rounds):
        return 2e9, 1e9


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(measure, "StepTimer", MadeUpTimer)
    monkeypatch.setattr(measure, "repeats", lambda step: 1)
    monkeypatch.setattr(measure, "seconds", lambda step, count: step + MadeUpTimer.noise())


def test_times_come_apart_into_their_causes(made_up):
    profile = measure_profile(TinyModel(), replace(SMALL, step_tokens=2048, max_context_tokens=2048))
    assert profile.tokens == (1, 8, 64, 512, 2048)
    for tokens, seconds in zip(profile.tokens[1:], profile.other_s[1:], strict=True):
        own_pairs = PAIR_S * tokens * (min(tokens, 32) + 1) / 2  # rows of a chunk attend to themselves
        assert seconds == pytest.approx(STEP_S + TOKEN_S * tokens + own_pairs)
    assert profile.context_tokens == (32, 128, 256, 512, 1024, 2048)
    for context, seconds in zip(profile.context_tokens, profile.attention_s, strict=True):
        assert seconds == pytest.approx(PAIR_S * 32 * (context - 32))
    assert profile.pair_s == pytest.approx(PAIR_S)
    assert profile.kv_token_s == pytest.approx(READ_S)
    assert (profile.load_bytes_per_s, profile.store_bytes_per_s) == (2e9, 1e9)


def test_noise_never_makes_more_context_cheaper(made_up, monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(MadeUpTimer, "noise", staticmethod(lambda: abs(rng.normal()) * 0.1))
    profile = measure_profile(TinyModel(), SMALL)
    assert list(profile.attention_s) == sorted(profile.attention_s)
    assert list(profile.other_s) == sorted(profile.other_s)
    assert profile.attention_s[0] == 0 <= profile.pair_s


def test_a_short_step_held_up_makes_no_longer_one_slow(made_up, monkeypatch):
    noise = itertools.chain([1.0], itertools.repeat(0.0))
    monkeypatch.setattr(MadeUpTimer, "noise", staticmethod(lambda: next(noise)))
    assert max(measure_profile(TinyModel(), SMALL).other_s) < 0.1


def test_a_tiny_model_is_measured_and_its_engine_judges_by_it(tmp_path):
    seen = []
    profile = measure_profile(TinyModel(), SMALL, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert min(profile.other_s) > 0
    assert min(profile.load_bytes_per_s, profile.store_bytes_per_s) > 0
    assert profile.model == shape_of(TinyModel())
    assert profile.device == "cpu"
    write_profile(tmp_path / "p.json", profile)
    config = EngineConfig(
        tiers=TierConfig(device_pages=8, host_pages=0), profile_path=tmp_path / "p.json", background=False
    )
    with Engine(TinyModel(), config=config) as engine:
        cost = engine._turns.parts.policy.cost
        assert cost == profile.recompute_cost(32)
    write_profile(tmp_path / "p.json", replace(profile, device="another"))
    with pytest.raises(InvalidArgumentError, match="they differ in device another and cpu"):
        Engine(TinyModel(), config=config)
    with pytest.raises(InvalidArgumentError, match=r"profile_path: .*nowhere"):
        Engine(TinyModel(), config=replace(config, profile_path=tmp_path / "nowhere"))


def test_without_a_profile_the_engine_says_that_it_estimates():
    tiers = TierConfig(device_pages=8, host_pages=0)
    with Engine(TinyModel(), config=EngineConfig(tiers=tiers, background=False)) as engine:
        assert "not measured" in engine._turns.parts.policy.cost.source


@pytest.mark.parametrize(
    ("name", "value"),
    [("step_tokens", 1), ("cost_rows", 0), ("decode_rows", 65), ("max_context_tokens", 5), ("rounds", 0)],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(InvalidArgumentError, match=f"{name}: got {value}"):
        replace(SMALL, **{name: value})


def test_what_does_not_fit_the_device_is_refused(monkeypatch):
    monkeypatch.setattr("pensieve_jax.engine.build.CPU_POOL_BYTES", 50 * 512 * 32)
    with pytest.raises(InvalidArgumentError, match="max_context_tokens: 2048 tokens of context"):
        measure_profile(TinyModel(), replace(SMALL, max_context_tokens=None))


@pytest.mark.parametrize(
    ("name", "simulated"),
    [
        ("opt-13b", "opt-13b"),
        ("opt-66b", "opt-66b"),
        ("llama-2-13b-kv10", "llama2-13b-kv10"),
        ("llama-2-70b", "llama2-70b"),
    ],
)
def test_named_dimensions_are_those_that_are_simulated(name, simulated):
    known = MODELS[simulated]
    shape = shape_of(abstract_model(preset(name), dtype=np.dtype(np.float16)), known.num_devices)
    assert shape.num_parameters == pytest.approx(known.num_parameters, rel=0.01)
    assert replace(shape, num_parameters=1, name="") == replace(known, num_parameters=1, name="")


def test_random_weights_of_named_dimensions(monkeypatch):
    small = dict(PRESETS["smollm2-135m"]) | {"num_hidden_layers": 1, "vocab_size": 64}
    monkeypatch.setattr("pensieve_jax.models.presets.PRESETS", {"small": small})
    model = random_model("small", dtype=np.dtype(np.float32), seed=3)
    assert model.spec.num_kv_heads == 3
    again = random_model("small", dtype=np.dtype(np.float32), seed=3)
    weights = [m.layers[0].mlp.up_proj.weight[...] for m in (model, again)]
    assert np.array_equal(*weights)


def test_the_kept_profile_is_of_the_model_that_its_name_says():
    profile = read_profile(KEPT / "smollm2-135m-cpu.json")
    served = shape_of(abstract_model(preset("smollm2-135m"), dtype=np.dtype(np.float32)))
    profile.check_fits(served, "cpu")
    assert profile.attention_s[-1] > profile.attention_s[1]
    assert profile.recompute_cost(32)(8192) > 2 * profile.recompute_cost(32)(32)


def test_a_model_spread_over_devices_is_measured():
    config = dict(PRESETS["smollm2-135m"]) | {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    model = make_model(config, dtype=np.dtype(np.float32), rngs=nnx.Rngs(0))
    profile = measure_profile(model, replace(SMALL, max_context_tokens=64), num_shards=2)
    assert profile.model == shape_of(model, 2)
    assert profile.model.kv_bytes_per_token == 1 * 2 * 1 * 16 * 4, "one KV head on each device"
