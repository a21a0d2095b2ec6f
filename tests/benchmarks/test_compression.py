"""Time compression: the formula, and the simulator's word that a divided run sees what the whole one sees."""

import pytest

from benchmarks.figures.simulated import simulate
from benchmarks.serving.compression import Tiers, compress_tiers, compress_workload, running_bytes
from benchmarks.serving.models import ModelChoice
from benchmarks.serving.run import RunSettings, ServerSettings
from benchmarks.serving.study import Point
from benchmarks.workloads import WorkloadSettings
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.simulator import DEVICES
from pensieve_jax.simulator.synthetic import SyntheticWorkload


def test_only_what_waits_is_divided():
    tiers = Tiers(device_bytes=40.0, host_bytes=200.0)
    assert compress_tiers(tiers, 4.0, 24.0) == Tiers(device_bytes=28.0, host_bytes=50.0)
    assert compress_tiers(tiers, 1.0, 24.0) == tiers
    workload = WorkloadSettings(think_time_s=60.0, requests_per_s=5.0)
    compressed = compress_workload(workload, 4.0)
    assert (compressed.think_time_s, compressed.requests_per_s) == (15.0, 5.0)


def test_running_turns_by_littles_law():
    # 10 turns a second that take 300 x 0.02 s each are 60 at a time
    size = running_bytes(
        requests_per_s=10, output_tokens=300, s_per_token=0.02, context_tokens=1000, kv_bytes_per_token=7
    )
    assert size == pytest.approx(60 * 1000 * 7)


def test_bad_factors():
    tiers = Tiers(device_bytes=40.0, host_bytes=0.0)
    with pytest.raises(InvalidArgumentError, match=r"factor: got 0.5, expected at least 1"):
        compress_tiers(tiers, 0.5, 1.0)
    with pytest.raises(InvalidArgumentError, match=r"running_bytes: got 40, expected less than .* 40"):
        compress_tiers(tiers, 2.0, 40.0)
    with pytest.raises(InvalidArgumentError, match=r"device_bytes: got 0, expected at least 1"):
        Tiers(device_bytes=0, host_bytes=0)


def hit_rates(factor):
    """Simulated, under pressure on both tiers, with many conversations."""
    choice = ModelChoice(name="tiny", dtype="float32")
    page_bytes = 32.0 * choice.kv_bytes_per_token
    whole = Tiers(device_bytes=1200 * page_bytes, host_bytes=900 * page_bytes)
    span_s = 45.0 / factor
    shape = SyntheticWorkload(mean_turns=6, mean_input_tokens=15, mean_output_tokens=15, sigma=0.6)
    workload = WorkloadSettings(
        source="synthetic",
        synthetic=shape,
        requests_per_s=120.0,
        think_time_s=8.0,
        conversations=round(2.2 * span_s * 120 / 6),
        max_context_tokens=256,
        head_start_s=span_s,
        answer_s_per_token=0.001,
    )
    point = Point(
        case="x",
        series="x",
        system="pensieve",
        choice=choice,
        server=ServerSettings(
            tiers=compress_tiers(whole, factor, 0.02 * whole.device_bytes),
            step_tokens=64,
            max_rows=32,
            max_context_tokens=256,
        ),
        workload=compress_workload(workload, factor),
        run=RunSettings(stop_s=span_s, warm_up_s=0.4 * span_s),
        facts={},
    )
    return simulate(point, DEVICES["h200"])


def test_divided_runs_see_what_the_whole_run_sees():
    whole, divided = hit_rates(1.0), hit_rates(3.0)
    assert divided["requests"] < 0.5 * whole["requests"]
    for name in ("hit_rate_device", "hit_rate_host", "recomputed_share"):
        assert 0.05 < whole[name] < 0.8
        assert divided[name] == pytest.approx(whole[name], abs=0.05)
    assert divided["served_requests_per_s"] == pytest.approx(whole["served_requests_per_s"], rel=0.25)
