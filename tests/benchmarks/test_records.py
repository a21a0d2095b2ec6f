"""What a result says of how it was made."""

import sys

from pensieve_jax.records import ROOT, command_line


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
