"""The examples do what the documentation says of them."""

import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_hints(monkeypatch, capsys):
    assert run("hints.py", monkeypatch, capsys) == [
        "chunks to load: 7",
        "history from the device: 207 from the host: 0",
        "computed again: 220",
    ]


def test_faults(monkeypatch, capsys):
    without, with_faults, same = run("faults.py", monkeypatch, capsys)
    assert without == "faults: 0 failed loads: 0"
    assert with_faults.split()[-1] != "0"
    assert same == "same answers: True"
