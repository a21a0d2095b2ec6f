"""The closed loop's tiny form: all turns are served, nothing compiles meanwhile, results are written."""

import pytest

from benchmarks.closed_loop import CASES, main
from pensieve_jax.records import read_records

ARGS = ["--model", "tiny", "--device-gb", "0.00017", "--host-gb", "0.0005", "--step-tokens", "32"]


def test_tiny_cases(tmp_path, capsys):
    results = tmp_path / "serving.jsonl"
    cases = ["tiny_closed", "tiny_pressure"]
    main([*ARGS, "--cases", *cases, "--results", str(results), "--steps", str(tmp_path)])
    records = read_records(results)
    found = {(entry["case"], entry["metric"]): entry for entry in records}
    for case in ("tiny_closed", "tiny_closed_stateless", "tiny_pressure"):
        sizes = CASES[case.removesuffix("_stateless")]
        time, rate = found[case, "time"], found[case, "output_rate"]
        tokens = sizes.conversations * sizes.turns * sizes.output_tokens
        assert time["value"] * rate["value"] == pytest.approx(tokens)
        assert time["shapes"]["compiled_while_serving"] == 0
    assert found["tiny_pressure", "chunks_swapped_in"]["value"] > 0
    steps = (tmp_path / "tiny_pressure.csv").read_text().splitlines()
    assert (
        sum(int(line.split(",")[4]) for line in steps[1:])
        == found["tiny_pressure", "chunks_swapped_in"]["value"]
    )
    stateless = found["tiny_closed_stateless", "time"]
    assert stateless["ceiling"] == found["tiny_closed", "time"]["value"]
    assert stateless["ratio"] == pytest.approx(stateless["value"] / stateless["ceiling"] / 1.6)
    assert "compiled after" in capsys.readouterr().out
