"""The serving command: points run, lines are kept, systems that aren't there are left out."""

import json

import pytest

from benchmarks.curves import throughput_at
from benchmarks.serving.__main__ import main
from benchmarks.serving.study import device_label


def arguments(out, *more):
    sizes = "--device-kv-gb 0.0009 --host-kv-gb 0.002 --max-rows 2 --step-tokens 32 --max-context 256"
    times = "--conversations 4 --rates 2,40 --think-time 1 --duration inf"
    common = f"--dtype float32 --source synthetic {sizes} {times} --cold --out {out}".split()
    return [*common, *more]


def test_command_keeps_a_line_for_each_point(tmp_path, capsys):
    main(arguments(tmp_path, "--systems", "vllm-prefix,pensieve", "--latency-limit", "60"))
    printed = capsys.readouterr().out
    assert "left out: vllm-prefix" in printed
    assert "seeds: [0]" in printed and "command: python" in printed
    lines = [json.loads(text) for text in (tmp_path / "serving-cpu.jsonl").read_text().splitlines()]
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
    again = [json.loads(text) for text in (tmp_path / "serving-cpu.jsonl").read_text().splitlines()]
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
