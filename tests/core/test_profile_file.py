"""The file of a profile, and what lies between its points."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import ModelShape
from pensieve_jax.core.profile import StepProfile, read_profile, write_profile

SHAPE = ModelShape(
    name="small", num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, num_parameters=10_000_000
)
PROFILE = StepProfile(
    model=SHAPE,
    device="some device",
    tokens=(1, 8, 64, 512),
    other_s=(0.010, 0.011, 0.012, 0.040),
    chunk_tokens=32,
    context_tokens=(32, 1000, 2000, 4000),
    attention_s=(0.0, 0.001, 0.003, 0.0075),
    pair_s=1e-9,
    kv_token_s=1e-7,
    load_bytes_per_s=5e10,
    store_bytes_per_s=4e10,
    versions={"jax": "1.2.3"},
    machine="some processor",
    date="2026-01-02",
    seed=7,
)


def test_what_is_written_is_read_again(tmp_path):
    write_profile(tmp_path / "p.json", PROFILE)
    assert read_profile(tmp_path / "p.json") == PROFILE
    assert PROFILE.source == "measured for small on some device (some processor), 2026-01-02, jax 1.2.3"


def test_the_cost_of_a_chunk_is_exact_at_the_points_and_linear_between_and_beyond():
    cost = PROFILE.recompute_cost(32)
    share = 0.040 * 32 / 512
    for context, seconds in zip(PROFILE.context_tokens, PROFILE.attention_s, strict=True):
        assert cost(context) == pytest.approx(seconds + share)
    assert cost(1500) == pytest.approx(0.002 + share)
    assert cost(6000) == pytest.approx(0.0075 + 0.0045 + share)  # the last slope goes on
    assert cost(0) == cost(32)
    assert cost.source == PROFILE.source


def test_chunks_of_other_sizes_cost_in_proportion_and_attention_can_weigh_more():
    assert PROFILE.recompute_cost(64)(2000) == pytest.approx(2 * PROFILE.recompute_cost(32)(2000))
    share = 0.040 * 32 / 512
    assert PROFILE.recompute_cost(32, attention_weight=3.0)(2000) == pytest.approx(0.009 + share)


def test_a_step_is_exact_at_the_points_and_grows_in_proportion_beyond():
    for tokens, seconds in zip(PROFILE.tokens, PROFILE.other_s, strict=True):
        assert PROFILE.step_s(tokens) == pytest.approx(seconds)
    assert PROFILE.step_s(288) == pytest.approx(0.026)
    assert PROFILE.step_s(1024) == pytest.approx(0.080)
    assert PROFILE.step_s(0) == PROFILE.step_s(1)


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_neither_falls_with_more(a, b):
    low, high = sorted((a, b))
    assert PROFILE.step_s(low) <= PROFILE.step_s(high)
    assert PROFILE.recompute_cost(32)(low) <= PROFILE.recompute_cost(32)(high)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("tokens", (8, 1, 64, 512), "tokens: got .* expected two or more, ascending"),
        ("tokens", (1, 8), "other_s: got 4 points, expected one for each of tokens"),
        ("other_s", (0.1, -1.0, 0.1, 0.1), "other_s: got -1.0, expected a number of at least 0"),
        ("attention_s", (0.0, float("nan"), 0.1, 0.1), "attention_s: got nan"),
        ("context_tokens", (1,), "context_tokens: got"),
        ("chunk_tokens", 0, "chunk_tokens: got 0"),
        ("pair_s", "fast", "pair_s: got 'fast'"),
        ("load_bytes_per_s", 0, "load_bytes_per_s: got 0, expected a number above 0"),
        ("model", {"name": "x"}, "is not a profile: .* missing"),
        ("model", asdict(SHAPE) | {"num_layers": 0}, "num_layers: got 0, expected an integer >= 1"),
        ("format", 2, "format: got 2, expected 1"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path, field, value, reason):
    fields = {"format": 1, **asdict(PROFILE), field: value}
    (tmp_path / "p.json").write_text(json.dumps(fields))
    with pytest.raises(InvalidArgumentError, match=rf"p\.json.*{reason}"):
        read_profile(tmp_path / "p.json")


def test_files_of_something_else(tmp_path):
    path = tmp_path / "p.json"
    for text in ("", "[1, 2]", "no json", '{"format": 1}', "{}"):
        path.write_text(text)
        with pytest.raises(InvalidArgumentError, match=r"p\.json"):
            read_profile(path)
    with pytest.raises(OSError, match="nowhere"):
        read_profile(tmp_path / "nowhere")


def test_a_profile_fits_its_own_model_and_device_alone():
    PROFILE.check_fits(replace(SHAPE, name="another name"), "some device")
    with pytest.raises(InvalidArgumentError, match="they differ in num_kv_heads 2 and 8"):
        PROFILE.check_fits(replace(SHAPE, num_kv_heads=8), "some device")
    with pytest.raises(InvalidArgumentError, match="differ in num_devices 1 and 2, device some device and x"):
        PROFILE.check_fits(replace(SHAPE, num_devices=2), "x")
