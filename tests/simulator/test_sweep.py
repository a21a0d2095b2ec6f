"""Sweeps, their files and plots, and the command."""

import csv
import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.simulator.command import simulate
from pensieve_jax.simulator.sweep import Point, grid, run_point, run_sweep, varied, write_csv, write_rows
from pensieve_jax.simulator.synthetic import SyntheticWorkload

WORKLOAD = SyntheticWorkload(conversations=20, mean_turns=3, mean_output_tokens=40).draw(0)
QUICK = {"duration_s": [60.0], "device_kv_gb": [3.0], "host_kv_gb": [6.0], "requests_per_s": [2.0]}


@pytest.fixture
def invoke(tmp_path):
    app = typer.Typer()
    app.command()(simulate)

    def run(*arguments):
        return CliRunner().invoke(app, [*map(str, arguments), "--out", str(tmp_path / "out")])

    return run


def test_a_grid_has_every_combination():
    points = grid(requests_per_s=[1.0, 2.0], policy=["lru", "retention-value"], seed=[0])
    assert [(p.requests_per_s, p.policy) for p in points] == [
        (1.0, "lru"),
        (1.0, "retention-value"),
        (2.0, "lru"),
        (2.0, "retention-value"),
    ]
    assert varied(points) == ["requests_per_s", "policy"]


@pytest.mark.parametrize(
    "field", ["requests_per_s", "think_time_s", "device_kv_gb", "host_kv_gb", "duration_s", "warm_up", "seed"]
)
def test_settings_out_of_range_are_refused(field):
    with pytest.raises(InvalidArgumentError, match=f"{field}: got -1"):
        Point(**{field: -1})


def test_rows_carry_settings_and_figures():
    row = run_point(WORKLOAD, grid(**QUICK)[0])
    assert row["policy"] == "retention-value"
    assert row["requests"] > 0
    assert 0 <= row["hit_rate_host"] <= row["hit_rate"] <= 1
    assert row["offered_requests_per_s"] > 0


def test_the_workloads_own_times_run_to_the_end():
    timed = SyntheticWorkload(conversations=5, mean_turns=2, mean_output_tokens=10).draw(0)
    row = run_point(timed, Point(warm_up=0.0))
    assert row["requests"] == sum(len(c.turns) for c in timed)


def test_processes_give_the_same_rows_and_progress_ends():
    points = grid(**QUICK, policy=["lru", "retention-value"])
    calls = []
    alone = list(run_sweep(WORKLOAD, points, progress=lambda *call: calls.append(call)))
    assert calls[-1] == (2000, 2000)
    calls.clear()
    several = list(run_sweep(WORKLOAD, points, processes=2, progress=lambda *call: calls.append(call)))
    assert calls == [(1, 2), (2, 2)]
    assert several == alone


def test_files_hold_the_rows(tmp_path):
    rows = [{"a": 1, "b": 0.5, "c": "x"}, {"a": 2, "b": float("nan"), "c": "y"}]
    write_csv(tmp_path / "r.csv", rows)
    write_rows(tmp_path / "r.jsonl", rows)
    with (tmp_path / "r.csv").open() as file:
        assert [row["a"] for row in csv.DictReader(file)] == ["1", "2"]
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert lines == [{"a": 1, "b": 0.5, "c": "x"}, {"a": 2, "b": None, "c": "y"}]


def test_the_command_sweeps_and_writes(invoke, tmp_path):
    result = invoke(
        "--rate",
        "1,2",
        "--policy",
        "lru,retention-value",
        "--duration",
        60,
        "--device-gb",
        10,
        "--host-gb",
        9,
    )
    assert result.exit_code == 0, result.output
    assert "1000 conversations" in result.output
    with (tmp_path / "out" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["requests_per_s"], row["policy"]) for row in rows] == [
        ("1.0", "lru"),
        ("1.0", "retention-value"),
        ("2.0", "lru"),
        ("2.0", "retention-value"),
    ]
    assert len((tmp_path / "out" / "sweep.jsonl").read_text().splitlines()) == 4
    pytest.importorskip("matplotlib")
    assert (tmp_path / "out" / "sweep.png").stat().st_size < 200_000


def test_the_command_replays_recorded_times(invoke, tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text('{"id": "a", "turns": [{"input_tokens": 9, "output_tokens": 9, "arrival_s": 4}]}\n')
    result = invoke(path, "--speed", 2, "--warm-up", 0)
    assert result.exit_code == 0, result.output
    row = json.loads((tmp_path / "out" / "sweep.jsonl").read_text())
    assert row["requests"] == 1
    assert 2.0 < row["end_s"] < 2.5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "rate: got none"),
        (("--rate", "fast"), "rate: got 'fast'"),
        (("--rate", "1", "--chunk", "1.5"), "chunk: got '1.5'"),
        (("--rate", "1", "--policy", "best"), "policy: got 'best'"),
        (("--rate", "1", "--keep-state", "no"), "keep-state: got 'no'"),
        (("--rate", "1", "--speed", "0"), "speed: got 0"),
    ],
)
def test_wrong_use_says_what_is_wrong(invoke, arguments, reason):
    result = invoke(*arguments)
    assert isinstance(result.exception, InvalidArgumentError)
    assert reason in str(result.exception)


def test_workloads_without_times_need_a_rate(invoke, tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text('{"id": "a", "turns": [{"input_tokens": 9, "output_tokens": 9}]}\n' * 2)
    result = invoke(path)
    assert "w.jsonl has no recorded times" in str(result.exception)


def test_nothing_here_imports_jax():
    code = (
        "import sys, pensieve_jax.simulator.command; assert not {'jax', 'torch', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
