"""docs/design/faults.md names tests that exist, and every test of this folder stands in its row."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows():
    """Number -> [(file, test)]."""
    text = (ROOT / "docs" / "design" / "faults.md").read_text(encoding="utf-8")
    found = [(int(number), NAME.findall(tests)) for number, _, _, tests in ROW.findall(text)]
    assert len(dict(found)) == len(found), "a number stands twice"
    return dict(found)


def functions(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_fault_has_tests_that_exist():
    table = rows()
    assert sorted(table) == list(range(1, 41))
    for number, tests in table.items():
        assert tests, f"fault {number} has no test"
        for path, name in tests:
            assert name in functions(path), f"fault {number}: {path} has no {name}"


def test_every_test_here_stands_in_the_row_of_its_number():
    table = rows()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for name in functions(path.relative_to(ROOT)):
            numbered = re.match(r"test_(\d+)_", name)
            if numbered:
                assert (f"tests/faults/{path.name}", name) in table[int(numbered[1])], name
