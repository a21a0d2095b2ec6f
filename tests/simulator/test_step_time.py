"""Step times, the virtual worker's copies, named hardware."""

from dataclasses import replace

import numpy as np
import pytest
from worlds import SLOW_LINK, SMALL_MODEL

from host_cache.plan import PageCopy
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.plans import Row
from pensieve_jax.records import ROOT, read_records
from pensieve_jax.simulator import DEVICES, MODELS, StepProfile, StepTimeModel, StepWork, make_config
from pensieve_jax.simulator.step_time import work_of
from pensieve_jax.simulator.worker import STAGING_PAGES, VirtualWorker

TIMES = StepTimeModel(SMALL_MODEL, SLOW_LINK)
LIGHT = StepTimeModel(replace(SMALL_MODEL, num_parameters=1), SLOW_LINK)
"""Its steps take no time but for attention, so that any time can be had."""
NOTHING = StepWork(0, 0, 0)
STEPS = ROOT / "benchmarks" / "results" / "step-h200.jsonl"
PAGE_BYTES = 8 * SMALL_MODEL.kv_bytes_per_token
STORE_S = PAGE_BYTES / SLOW_LINK.store_bytes_per_s
LOAD_S = PAGE_BYTES / SLOW_LINK.load_bytes_per_s


def copies(count, first=0):
    return tuple(PageCopy(device_page=first + i, host_page=first + i) for i in range(count))


def worker(**others):
    return VirtualWorker(LIGHT, page_tokens=8, **others)


def work_for(seconds):
    """Work that computes for so long."""
    pairs = seconds / (LIGHT.compute_s(StepWork(0, 10**9, 0)) - LIGHT.compute_s(NOTHING)) * 10**9
    return StepWork(0, round(pairs), 0)


def test_work_of_rows():
    def row(start, count):
        return Row(
            request_id=0, token_ids=np.zeros(count, np.int32), start=start, page_ids=np.zeros(1), sample=None
        )

    assert work_of([row(0, 3), row(10, 2), row(7, 1)]) == StepWork(6, (1 + 2 + 3) + (11 + 12) + 8, 3 + 12 + 8)


def test_small_steps_read_weights_and_large_ones_compute():
    weights_s = SMALL_MODEL.weight_bytes / SLOW_LINK.memory_bytes_per_s
    assert TIMES.compute_s(StepWork(1, 0, 0)) == TIMES.compute_s(StepWork(2, 0, 0)) == weights_s
    many = TIMES.compute_s(StepWork(10_000, 0, 0))
    assert many == pytest.approx(10_000 * 2 * SMALL_MODEL.num_parameters / SLOW_LINK.matmul_flops_per_s)


def test_decode_attention_reads_kv_and_prefill_attention_computes():
    base = TIMES.compute_s(NOTHING)
    read = TIMES.compute_s(StepWork(0, 1000, 1000)) - base
    assert read == pytest.approx(1000 * SMALL_MODEL.kv_bytes_per_token / SLOW_LINK.memory_bytes_per_s)
    computed = TIMES.compute_s(StepWork(0, 10**7, 1000)) - base
    assert computed == pytest.approx(10**7 * 4 * 4 * 8 * 64 / SLOW_LINK.attention_flops_per_s)


def test_tensor_parallelism_divides_and_adds_all_reduces():
    two = StepTimeModel(replace(SMALL_MODEL, num_devices=2), SLOW_LINK)
    work = StepWork(10_000, 10**8, 10_000)
    reduces_s = 8 * (SLOW_LINK.all_reduce_latency_s + 10_000 * 1024 / SLOW_LINK.all_reduce_bytes_per_s)
    assert two.compute_s(work) == pytest.approx(TIMES.compute_s(work) / 2 + reduces_s)


def test_recomputing_costs_more_behind_more_context():
    cost = TIMES.recompute_cost(32, 16_384)
    assert cost(0) < cost(1000) < cost(2000)
    assert cost(2000) - cost(1000) == pytest.approx(cost(1000) - cost(0))
    assert "made up" in cost.source


def test_profiles_replace_the_estimate():
    profile = StepProfile(
        model=SMALL_MODEL,
        device="some device",
        tokens=(1, 100),
        other_s=(0.01, 0.02),
        chunk_tokens=32,
        context_tokens=(32, 1000),
        attention_s=(0.0, 0.5),
        pair_s=1e-6,
        kv_token_s=1e-5,
        load_bytes_per_s=3e9,
        store_bytes_per_s=2e9,
        versions={},
        machine="some processor",
        date="2026-01-01",
        seed=0,
    )
    times = StepTimeModel(SMALL_MODEL, SLOW_LINK, profile)
    assert times.source == profile.source
    assert times.compute_s(StepWork(1, 10, 10)) == pytest.approx(0.01 + 1e-4)
    assert times.compute_s(StepWork(100, 10**6, 10)) == pytest.approx(0.02 + 1.0)
    assert times.compute_s(StepWork(200, 0, 0)) == pytest.approx(0.04)
    assert 0.01 < times.compute_s(StepWork(50, 0, 0)) < 0.02
    assert times.recompute_cost(32, 16_384)(1000) == pytest.approx(0.5 + 0.02 * 32 / 100)

    config = make_config(profile=profile, load_or_recompute=True)
    assert config.model == SMALL_MODEL
    assert (config.device.name, config.device.load_bytes_per_s) == ("some device", 3e9)
    page_bytes = 32 * SMALL_MODEL.kv_bytes_per_token
    assert config.cache.load_s_per_page == pytest.approx(page_bytes / 3e9)
    with pytest.raises(InvalidArgumentError, match="model: got 'opt-13b', expected one of small"):
        make_config(profile=profile, model="opt-13b")
    with pytest.raises(InvalidArgumentError, match="device: got 'h200', expected one of some device"):
        make_config(profile=profile, device="h200")


def test_a_step_with_swap_ins_takes_the_longer_and_one_layer():
    machine = worker()
    load_s = 10 * LOAD_S
    outcome = machine.execute(work_for(3 * load_s), 10, (), 5.0)
    assert outcome.end_s - 5.0 == pytest.approx(3 * load_s + load_s / 4, rel=1e-3)
    outcome = machine.execute(work_for(load_s / 2), 10, (), 5.0)
    assert outcome.end_s - 5.0 == pytest.approx(load_s + load_s / 2 / 4, rel=1e-3)
    assert outcome.swap_in_wait_s == pytest.approx(load_s / 2 + load_s / 8, rel=1e-3)
    assert machine.swap_in_wait_s > outcome.swap_in_wait_s


def test_swap_outs_hide_behind_compute_and_end_in_order():
    machine = worker()
    outcome = machine.execute(work_for(2.5 * STORE_S), 0, copies(2), 0.0)
    assert outcome.end_s == pytest.approx(2.5 * STORE_S, rel=1e-4)
    assert outcome.finished_swap_outs == copies(2)
    first, second = copies(2), copies(3, first=10)
    assert machine.execute(work_for(1.5 * STORE_S), 0, first, 0.0).finished_swap_outs == ()
    assert machine.copies_under_way
    assert machine.execute(work_for(1.5 * STORE_S), 0, second, 0.0).finished_swap_outs == first
    assert machine.pass_time(3 * STORE_S) == second
    assert not machine.copies_under_way


def test_swap_outs_that_outrun_the_link_stall_steps():
    machine = worker()
    outcome = machine.execute(work_for(STORE_S), 0, copies(STAGING_PAGES + 5), 0.0)
    assert outcome.end_s == pytest.approx(6 * STORE_S, rel=1e-3)
    assert machine.swap_out_stall_s == pytest.approx(5 * STORE_S)


def test_swap_outs_pause_for_swap_ins_or_share_the_link():
    load_s = 8 * LOAD_S  # twice a store
    held, shared = worker(), worker(hold_swap_outs=False)
    outcome = held.execute(work_for(load_s / 10), 8, copies(1), 0.0)
    assert outcome.finished_swap_outs == ()
    outcome = shared.execute(work_for(load_s / 10), 8, copies(1), 0.0)
    assert outcome.finished_swap_outs == copies(1)
    assert outcome.end_s == pytest.approx(load_s / 0.8 + load_s / 40, rel=1e-3)


def test_waiting_ends_all_copies():
    machine = worker()
    outcome = machine.wait(copies(4), 1.0)
    assert outcome.end_s == pytest.approx(1.0 + 4 * STORE_S)
    assert outcome.finished_swap_outs == copies(4)


@pytest.mark.parametrize(
    ("name", "kv_bytes", "weight_gb"),
    [
        ("opt-13b", 819_200, 25.7),
        ("llama2-13b-kv10", 204_800, 22.6),
        ("opt-66b", 2_359_296 // 4, 131.4 / 4),
        ("llama2-70b", 327_680 // 4, 137.4 / 4),
    ],
)
def test_named_models(name, kv_bytes, weight_gb):
    shape = MODELS[name]
    assert shape.kv_bytes_per_token == kv_bytes
    assert shape.weight_bytes / 1e9 == pytest.approx(weight_gb, rel=0.01)


@pytest.mark.parametrize(
    ("case", "rows", "new", "past"),
    [
        ("decode_b1_ctx1024", 1, 1, 1023),
        ("decode_b64_ctx1024", 64, 1, 1023),
        ("decode_b128_ctx1024", 128, 1, 1023),
        ("prefill_16x1024", 16, 1024, 0),
        ("prefill_1x8192", 1, 8192, 0),
    ],
)
def test_a_step_on_the_h200_is_near_the_measured_one(case, rows, new, past):
    measured = {line["case"]: line for line in read_records(STEPS)}[case]
    times = StepTimeModel(MODELS["llama2-13b-kv10"], DEVICES["h200"])
    pairs = rows * (new * past + new * (new + 1) // 2)
    seconds = times.compute_s(StepWork(rows * new, pairs, rows * (past + new)))
    assert seconds == pytest.approx(measured["value"] / 1e3, rel=0.06)


def test_tiers_follow_from_bytes():
    config = make_config()
    assert (config.cache.device_pages, config.cache.host_pages) == (1525, 7629)
    stateless = make_config(keep_state=False, page_tokens=16)
    assert (stateless.cache.device_pages, stateless.cache.host_pages) == (3051, 0)
    with pytest.raises(InvalidArgumentError, match="model: got 'x', expected one of opt-13b"):
        make_config(model="x")
    with pytest.raises(InvalidArgumentError, match="device_pages: got 0"):
        make_config(device_kv_bytes=5)
