"""What a result says of how it was made."""

import sys

from benchmarks.kernels.common import Report
from pensieve_jax.records import ROOT, command_line, commit, read_records


def test_command_has_no_paths_of_this_machine(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    given = [
        str(ROOT / "benchmarks" / "turns.py"),
        "--out",
        "/somewhere/out",
        str(ROOT / "docs"),
        "a=1;b=2",
        "demo/x",
    ]
    monkeypatch.setattr(sys, "argv", given)
    assert command_line() == "python benchmarks/turns.py --out out docs 'a=1;b=2' demo/x"


def test_a_kernels_result_takes_the_place_of_its_case(tmp_path):
    path = tmp_path / "out" / "kernels.jsonl"
    assert read_records(path) == []
    report = Report(path=path, prefix="triton_", machine=("a GPU", "1.2"))
    for value in (1.0, 2.00004):
        report.add("a", "time", value, "us", 4.0, 4.0 / value, rows=3)
    report.add("b", "rate", 3.0, "GB/s")
    first, second = read_records(path)
    assert (first["case"], first["value"], first["ratio"]) == ("triton_a", 2.0, 2.0)
    assert (first["device"], first["driver"], first["shapes"]) == ("a GPU", "1.2", {"rows": 3})
    assert (first["command"], first["commit"]) == (command_line(), commit())
    assert (second["case"], second["ceiling"], second["shapes"]) == ("triton_b", None, {})
