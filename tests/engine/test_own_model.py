"""The example of a model of one's own runs, and its conversation is kept between turns."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def test_example(capsys):
    names = runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, second = capsys.readouterr().out.splitlines()
    assert "tokens_new=3, tokens_from_device=0" in first
    assert f"tokens_new=3, tokens_from_device={3 + 8 - 1}" in second
    assert names["SPEC"].name == "tiny"


def test_example_is_short():
    lines = EXAMPLE.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("SPEC"))
    end = next(n for n, line in enumerate(lines) if line.startswith("if __name__"))
    assert sum(1 for line in lines[begin:end] if line.strip()) < 60
