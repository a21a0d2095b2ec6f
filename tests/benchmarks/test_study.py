"""The serving command: points run, lines are kept, systems that aren't there are left out."""

import sys
import weakref
from contextlib import contextmanager

import pytest

from benchmarks.curves import throughput_at
from benchmarks.figures.common import options, rates_of
from benchmarks.serving.__main__ import main
from benchmarks.serving.compression import Tiers
from benchmarks.serving.models import ModelChoice
from benchmarks.serving.run import Opener, RunSettings, ServerSettings
from benchmarks.serving.study import Study, device_label, make_console, rate_points
from benchmarks.workloads import WorkloadSettings
from pensieve_jax.records import read_records
from tests.benchmarks.fake_systems import OneAtATime, StepClock


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Results are filed by the machine's GPU, which these runs don't use."""
    monkeypatch.setattr("benchmarks.serving.study.gpu", lambda: None)


def arguments(out, *more):
    sizes = "--device-kv-gb 0.0009 --host-kv-gb 0.002 --max-rows 2 --step-tokens 32 --max-context 256"
    times = "--conversations 4 --rates 2,40 --think-time 1 --duration inf"
    common = f"--dtype float32 --source synthetic {sizes} {times} --cold --out {out}".split()
    return [*common, *more]


def test_command_keeps_a_line_for_each_point(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    main(arguments(tmp_path, "--systems", "vllm-prefix,pensieve", "--latency-limit", "60"))
    printed = capsys.readouterr().out
    assert "left out: vllm-prefix" in printed
    assert "seeds: [0]" in printed and "command: python" in printed
    lines = read_records(tmp_path / "serving-cpu.jsonl")
    assert [line["case"] for line in lines] == ["serving_pensieve_rate2", "serving_pensieve_rate40"]
    for line in lines:
        figures = line["shapes"]["figures"]
        assert line["metric"] == "normalized_latency_s_mean"
        assert line["value"] == figures["normalized_latency_s_mean"] > 0
        assert figures["requests"] > 0
        assert line["versions"]["jax"]
        assert f"digest {line['shapes']['digest']}" in printed
    # A second run with the same seed serves the same tokens; its lines take the place of the first ones.
    main(arguments(tmp_path, "--systems", "gpu-only", "--latency-limit", "60"))
    again = read_records(tmp_path / "serving-cpu.jsonl")
    assert [line["case"] for line in again[:2]] == [line["case"] for line in lines]
    assert [line["shapes"]["digest"] for line in again[2:]] == [line["shapes"]["digest"] for line in lines]


def test_bad_input_ends_with_one_line(tmp_path):
    with pytest.raises(SystemExit, match="serving: system: got 'x', expected a URL or one of pensieve"):
        main(arguments(tmp_path, "--systems", "x"))


def test_throughput_at_a_latency():
    def row(latency, rate):
        return {"normalized_latency_s_mean": latency, "served_requests_per_s": rate}

    rows = [row(0.2, 3.0), row(0.05, 1.0), row(0.1, 2.0)]
    assert throughput_at(rows, 0.15) == pytest.approx(2.5)
    assert throughput_at(rows, 0.3) is None
    assert throughput_at(rows, 0.01) is None
    assert throughput_at([*rows, row(float("nan"), 9.0)], 0.1) == pytest.approx(2.0)


def test_device_names():
    assert device_label(None) == "cpu"
    assert device_label(("NVIDIA H200", "580")) == "h200"


def test_summary_compares_with_what_was_run_apart(tmp_path):
    def run(system, *points):
        study = Study("serving", tmp_path, make_console())
        lines = [
            {
                "case": f"fig10_m_{system}_rate{rate:g}",
                "metric": "normalized_latency_s_mean",
                "value": latency,
                "unit": "s",
                "shapes": {
                    "figures": {
                        "normalized_latency_s_mean": latency,
                        "served_requests_per_s": rate,
                        "hit_rate": None,
                    }
                },
            }
            for rate, latency in points
        ]
        study.keep(lines)
        study.rows = [{"series": "fig10_m"}]
        return {line["case"]: line for line in study.summary(0.12, ["vllm-stateless", "stateless"])}

    run("vllm-stateless", (2.0, 0.04), (4.0, 0.2))
    found = run("pensieve", (6.0, 0.04), (8.0, 0.2))
    assert found["fig10_m_at120ms_vllm-stateless"]["value"] == pytest.approx(3.0)
    ours = found["fig10_m_at120ms_pensieve"]
    assert ours["value"] == pytest.approx(7.0)
    assert ours["ceiling"] == pytest.approx(3.0)
    assert ours["ratio"] == pytest.approx(7 / 3)
    assert ours["shapes"]["peer"] == "vllm-stateless"


def test_rates_by_system():
    parser = options("", model="tiny", systems=("a", "b"), rates={"default": (1.0,), "b": (2.0,)})
    assert rates_of(parser.parse_args([])) == {"a": [1.0], "b": [2.0]}
    assert rates_of(parser.parse_args(["--rates", "3,4"])) == {"a": [3.0, 4.0], "b": [3.0, 4.0]}
    assert rates_of(parser.parse_args(["--rates", "a=8,12;c=1"])) == {"a": [8.0, 12.0], "b": [2.0]}


def test_a_system_is_gone_before_the_next_one_is_opened(tmp_path, monkeypatch):
    seen = []

    @contextmanager
    def opened(self, name, clock, **_):
        assert all(reference() is None for reference in seen)
        system = OneAtATime(clock, prefill_s=0.0, token_s=0.0)
        system.clock = StepClock()
        seen.append(weakref.ref(system))
        yield system

    monkeypatch.setattr(Opener, "open", opened)
    choice = ModelChoice(name="tiny", dtype="float32")
    workload = WorkloadSettings(source="synthetic", conversations=2, max_context_tokens=200)
    server = ServerSettings(tiers=Tiers(device_bytes=1e6, host_bytes=0.0))
    study = Study("serving", tmp_path, make_console())
    study.run(
        rate_points(
            series="x",
            systems=["pensieve", "stateless"],
            rates=[5.0],
            choice=choice,
            server=lambda _: server,
            workload=lambda _: workload,
            run=RunSettings(stop_s=1000.0, warm_up_s=0.0),
        )
    )
    assert len(seen) == 2
    assert [row["system"] for row in study.rows] == ["pensieve", "stateless"]
