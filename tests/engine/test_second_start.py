"""A second start finds all programs compiled, and traces none."""

import json
import os
import subprocess
import sys


def start(folder):
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.serve_once", str(folder)],
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {line["model"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_a_second_start_traces_nothing_and_answers_the_same(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    assert first["llama"]["lowered"]
    assert first["opt on two"]["kept"] > first["llama"]["kept"] > 0
    assert first["llama again"]["lowered"] == []
    assert first["llama again"]["tokens"] == first["llama"]["tokens"]
    for name in ("llama", "llama again", "opt on two"):
        assert second[name]["lowered"] == []
    # A model's own code may change without anybody noticing.
    assert first["own"]["kept"] == first["opt on two"]["kept"]
    assert second["own"]["lowered"]
    for name, line in first.items():
        assert second[name]["tokens"] == line["tokens"]
        assert second[name]["compiled_while_serving"] == line["compiled_while_serving"] == 0
        assert second[name]["kept"] == first["own"]["kept"]
