"""The demo in tiny forms; in its full size it is run by `make demo`."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from test_commands import pensieve

from pensieve_jax.assets import SHAREGPT
from pensieve_jax.demo import DemoSizes, compare, random_workload, serve, summary_lines
from pensieve_jax.demo import workload as workload_module
from pensieve_jax.demo.workload import think_time_order
from tests.assets import ASSETS_FOLDER, smollm2_path

SIZES = {"conversations": 3, "turns": 3, "max-output": 2, "device-pages": 16, "host-pages": 5}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", size)]


def check_numbers(path, *, conversations, turns):
    numbers = json.loads(path.read_text())
    assert numbers["texts_equal"]
    assert numbers["differences"] == []
    assert [row["number"] for row in numbers["by_turn"]] == list(range(1, turns + 1))
    kept, lost = numbers["with_state"], numbers["without_state"]
    for run in (kept, lost):
        assert len(run["turns"]) == conversations * turns
        tokens = run["tokens"]
        parts = ("new", "from_device", "from_host", "recomputed")
        assert tokens["context"] == sum(tokens[part] for part in parts)
        receipts = [turn["receipt"] for turn in run["turns"]]
        for part in parts:
            assert tokens[part] == sum(receipt[f"tokens_{part}"] for receipt in receipts)
            assert tokens[part] == run["counters"][f"tokens_{part}"]
    assert kept["tokens"]["context"] == lost["tokens"]["context"]
    assert lost["tokens"]["from_device"] == lost["tokens"]["from_host"] == 0
    assert kept["tokens"]["computed"] < lost["tokens"]["computed"]
    return numbers


def test_fallback(tmp_path):
    done = pensieve("demo", "--random-model", *TINY, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "fallback: a small model with random weights" in done.stdout
    assert "answers (token ids) of both runs are equal: yes" in done.stdout
    numbers = check_numbers(tmp_path / "out" / "demo.json", conversations=3, turns=3)
    assert numbers["fallback"]
    assert numbers["not_used"] == []
    assert numbers["with_state"]["counters"]["chunks_dropped"] > 0
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_used_and_what_differs_is_said(monkeypatch):
    smallest = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(workload_module, "RANDOM_MODEL", workload_module.RANDOM_MODEL | smallest)
    workload = random_workload(conversations=1, turns=2, seed=0)
    sizes = DemoSizes(max_output_tokens=2, device_pages=20, host_pages=0)
    shown = []
    kept, lost, compiled = serve(workload, sizes, lambda *what: shown.append(what))
    assert shown[-1] == ("serving", 2, 2)
    comparison = compare(workload, kept, lost, compiled)
    assert comparison.equal
    lines = "\n".join(summary_lines(comparison))
    assert "no history was swapped in from the host" in lines
    assert "no history had to be recomputed" in lines
    assert "no history was found on the device" not in lines

    first, *others = lost.turns
    other = replace(lost, turns=(replace(first, token_ids=(1, 2)), *others))
    different = compare(workload, kept, other, compiled)
    assert not different.equal
    assert "  conversation 1, turn 1: with state '" in "\n".join(summary_lines(different))


def test_a_pool_that_is_too_small(tmp_path):
    done = pensieve("demo", "--random-model", "--device-pages", "2", "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: input: got")
    assert "Traceback" not in done.stderr


def test_interrupted(tmp_path):
    command = [sys.executable, "-m", "pensieve_jax.cli", "demo", "--random-model", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("Serving"):
            assert process.poll() is None
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted\n"
    assert not (tmp_path / "demo.json").exists()


def test_order_is_fair_and_repeatable():
    order = think_time_order(5, 4, seed=3)
    assert sorted(order) == [(c, t) for c in range(5) for t in range(4)]
    for conversation in range(5):
        assert [t for c, t in order if c == conversation] == list(range(4))
    assert order == think_time_order(5, 4, seed=3)
    assert order != think_time_order(5, 4, seed=4)
    assert [c for c, _ in order] != sorted(c for c, _ in order)


@pytest.mark.skipif(
    smollm2_path() is None or not (ASSETS_FOLDER / SHAREGPT.path).is_file(),
    reason="SmolLM2 and ShareGPT were not fetched",
)
def test_real_conversations(tmp_path):
    done = pensieve(
        *("demo", "--conversations", "2", "--turns", "3", "--max-output", "4", "--assets", ASSETS_FOLDER),
        *("--device-pages", "36", "--host-pages", "6", "--out", tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "texts of both runs are equal: yes" in done.stdout
    numbers = check_numbers(tmp_path / "demo.json", conversations=2, turns=3)
    assert not numbers["fallback"]
    assert all(turn["text"] for turn in numbers["with_state"]["turns"])
