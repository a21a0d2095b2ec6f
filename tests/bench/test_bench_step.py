"""pensieve bench step: floors by hand, cases on a tiny model, what is kept and shown."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from pensieve_jax.bench import PRESETS, StepBench, find_preset
from pensieve_jax.bench.cases import CASES, Case, Kind, decode_case, prefill_case
from pensieve_jax.bench.floor import step_floor
from pensieve_jax.bench.report import case_id
from pensieve_jax.bench.timing import Ceilings, seconds_each
from pensieve_jax.bench.trace import read_trace
from pensieve_jax.cli import app
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import ModelShape
from pensieve_jax.records import read_records

SHAPE = ModelShape(
    name="small",
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    num_parameters=1010,
    bytes_per_value=2,
)
HEAD_PARAMETERS = 10
RATES = Ceilings(copy_bytes_per_s=100.0, matmul_flops=1000.0)


def test_the_floor_of_a_decode_step_is_what_it_reads():
    floor = step_floor(decode_case(2, 30), SHAPE, HEAD_PARAMETERS, RATES)
    assert floor.bytes == 2 * 1010 + 2 * 30 * 8
    assert floor.products_s == pytest.approx(2 * 1010 / 100)
    assert floor.attention_s == pytest.approx(2 * 30 * 8 / 100)


def test_the_floor_of_a_prefill_step_is_what_it_computes():
    floor = step_floor(prefill_case(3, 100), SHAPE, HEAD_PARAMETERS, RATES)
    assert floor.flops == 2 * 1000 * 300 + 2 * 10 * 3 + 3 * 100 * 50.5 * 16
    assert floor.products_s == pytest.approx(2 * 1000 * 300 / 1000 + max(2 * 10 / 100, 60 / 1000))
    assert floor.attention_s == pytest.approx(3 * 100 * 50.5 * 16 / 1000)


def test_the_time_of_a_call_leaves_constant_costs_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pensieve_jax.bench.timing.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run():
        now[0] += 2.0

    def wait(_):
        now[0] += 7.0

    assert seconds_each(run, wait=wait) == pytest.approx(2.0)


def test_cases_are_those_of_the_bars():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {
        "mixed_64dec_2000",
        "decode_b1_ctx1024",
        "decode_b256_ctx512",
        "prefill_8x4096",
        "swapin_b8_200_over_8000",
    } <= set(names)
    small = decode_case(128, 1024).scaled(64)
    assert (small.rows, small.new_tokens, small.past_tokens) == (2, 1, 15)


@pytest.fixture(scope="module")
def bench():
    cases = [
        decode_case(128, 1024),
        prefill_case(2, 8192),
        Case(name="swap in", kind=Kind.SWAP_IN, rows=64, new_tokens=200, past_tokens=8000),
        Case(name="swap out", kind=Kind.SWAP_OUT, rows=64, new_tokens=1, past_tokens=1023),
        Case(name="host", kind=Kind.HOST, rows=64, new_tokens=1, past_tokens=1023),
        Case(name="mixed", kind=Kind.MIXED, rows=64, new_tokens=1, past_tokens=1023, prompt_tokens=2000),
    ]
    bench = StepBench(PRESETS["tiny"], cases, num_shards=1, step_tokens=64 * 64)
    yield bench
    bench.close()


@pytest.mark.parametrize("place", range(6))
def test_every_kind_of_case_is_measured(bench, place):
    result = bench.measure(bench.cases[place])
    assert result.seconds > 0
    assert result.floor.seconds > 0
    assert all(seconds > 0 for seconds in result.beside_s.values())


def test_a_second_run_traces_no_step(tmp_path):
    cases = [decode_case(128, 1024), prefill_case(2, 8192)]
    lowered = []

    def listen(event, duration_secs, **details):
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            lowered.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for steps in (["jit(whole)"] * 2, []):
            lowered.clear()
            bench = StepBench(PRESETS["tiny"], cases, num_shards=1, step_tokens=64 * 64, programs=tmp_path)
            assert len(list(bench.compile())) == 2
            assert bench.measure(bench.cases[0]).seconds > 0
            assert [name for name in lowered if name == "jit(whole)"] == steps
            bench.close()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_case_longer_than_a_step_runs_in_pieces(bench):
    rows = bench._split(bench.cases[1])
    assert [[len(row.token_ids) for row in step] for step in rows] == [[64], [64]]
    one_row = Case(name="long", rows=1, new_tokens=100, past_tokens=10)
    pieces = [row for step in bench._split(one_row) for row in step]
    assert [(row.start, len(row.token_ids), row.sample is not None) for row in pieces] == [
        (10, 64, False),
        (74, 36, True),
    ]


def test_pages_of_rows_do_not_overlap(bench):
    case = replace(decode_case(128, 1024).scaled(64), rows=2)
    pages = np.concatenate([row.page_ids for step in bench._split(case) for row in step])
    assert len(set(pages.tolist())) == len(pages) <= bench.shapes.num_pages


def test_a_trace_is_read():
    def event(name, start, duration):
        return SimpleNamespace(name=name, start_ns=start, duration_ns=duration)

    stream = SimpleNamespace(name="Stream #1", events=[event("a", 0, 10), event("b", 20, 30)])
    other = SimpleNamespace(name="Stream #2", events=[event("a", 5, 10)])
    ignored = SimpleNamespace(name="XLA Ops", events=[event("c", 0, 1000)])
    gpu = SimpleNamespace(name="/device:GPU:0", lines=[stream, other, ignored])
    trace = read_trace(SimpleNamespace(planes=[SimpleNamespace(name="/host:CPU", lines=[]), gpu]))
    assert [(k.name, k.launches) for k in trace.kernels] == [("b", 1), ("a", 2)]
    assert trace.span_s == pytest.approx(50e-9)
    assert trace.busy_s == pytest.approx(45e-9)
    assert trace.idle_share == pytest.approx(0.1)
    assert read_trace(SimpleNamespace(planes=[])) is None


def test_the_command_shows_a_table_and_keeps_lines(tmp_path):
    out = tmp_path / "step.jsonl"
    arguments = [
        "bench",
        "step",
        "tiny",
        "--only",
        "decode_b64_ctx",
        "--out",
        str(out),
        "--trace",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "decode_b64_ctx1024" in done.output
    lines = read_records(out)
    assert [line["case"] for line in lines] == [
        "tiny/ceiling_copy",
        "tiny/ceiling_matmul",
        "tiny/decode_b64_ctx1024",
    ]
    assert lines[2]["ratio"] == pytest.approx(lines[2]["ceiling"] / lines[2]["value"], rel=0.02, abs=2e-3)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_what_there_is_not_is_refused():
    with pytest.raises(InvalidArgumentError, match="MODEL"):
        find_preset("gpt")
    done = CliRunner().invoke(app, ["bench", "step", "tiny", "--only", "nothing"])
    assert done.exit_code == 2


def test_cases_are_called_as_the_bars_call_them():
    assert case_id("llama-2-13b-kv10", 1, "decode_b1_ctx1024") == "decode_b1_ctx1024"
    assert case_id("opt-13b", 1, "prefill_8x4096") == "opt-13b/prefill_8x4096"
    assert case_id("llama-2-70b", 2, "decode_b64_ctx1024") == "tp2_llama70b_decode_b64"
    assert case_id("llama-2-13b-kv10", 2, "decode_b64_ctx1024") == "tp2_13b_decode_b64"
