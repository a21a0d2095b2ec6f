"""`pensieve profile`, and the commands that read its file."""

import pytest
import typer
from test_commands import pensieve
from typer.testing import CliRunner

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.profile import read_profile
from pensieve_jax.info import checkpoint_facts
from pensieve_jax.models import load_model
from pensieve_jax.models.shape import shape_of
from pensieve_jax.profiler.command import profile
from pensieve_jax.simulator.command import simulate


def invoke(command, *arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)])


def test_the_command_measures_and_others_read_its_file(checkpoint, tmp_path):
    path = tmp_path / "made" / "p.json"
    arguments = ("--max-context", "256", "--step-tokens", "64", "--rounds", "1", "--out", path)
    done = invoke(profile, checkpoint, *arguments)
    assert done.exit_code == 0, done.output
    assert "recomputing a chunk that ends at 256 tokens" in done.stdout
    assert read_profile(path).model == shape_of(load_model(checkpoint))

    facts = checkpoint_facts(checkpoint, path)
    assert facts["cost of recomputing"].startswith("measured for llama-2x64 on cpu")
    assert checkpoint_facts(checkpoint)["cost of recomputing"].endswith("not measured")

    sizes = ("--rate", "5", "--duration", "20", "--device-gb", "0.01", "--host-gb", "0.02")
    done = invoke(simulate, "--profile", path, *sizes, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert '"model": "llama-2x64", "device": "cpu"' in (tmp_path / "out" / "sweep.jsonl").read_text()
    done = invoke(simulate, "--profile", path, *sizes, "--model", "opt-13b")
    assert str(done.exception) == "model: got 'opt-13b', expected one of llama-2x64"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("somewhere", "--dimensions", "opt-13b"), "dimensions: got a checkpoint, too"),
        (("--dimensions", "gpt"), "dimensions: got 'gpt', expected one of opt-13b"),
        (("--dimensions", "opt-13b", "--dtype", "int3"), "dtype='int3'"),
        (("--rounds", 0), "rounds: got 0"),
        ((), "CHECKPOINT: got none"),
    ],
)
def test_wrong_use_says_what_is_wrong(arguments, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(profile, *arguments)
    assert isinstance(result.exception, InvalidArgumentError)
    assert reason in str(result.exception)


def test_a_wrong_file_is_one_line(checkpoint, tmp_path):
    (tmp_path / "p.json").write_text("{}")
    done = pensieve("info", checkpoint, "--profile", tmp_path / "p.json")
    assert done.returncode == 2
    assert done.stderr == "error: p.json: the field 'format' is missing\n"
