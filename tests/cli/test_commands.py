"""Every command in a process of its own: what it says, its exit status, and no traceback ever."""

import os
import subprocess
import sys

import pytest


def pensieve(*arguments, stdin="", cwd=None):
    """The command, run to its end."""
    environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "pensieve_jax.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        input=stdin,
        cwd=cwd,
        env=environment,
        timeout=120,
        check=False,
    )


def refused(status, *arguments, cwd=None):
    """The text of a refusal, which is one line."""
    done = pensieve(*arguments, cwd=cwd)
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"], ["demo", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\nfrom pensieve_jax.cli import app\n"
        f"try:\n    app({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'jax', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_info(checkpoint):
    done = pensieve("info", checkpoint)
    assert done.returncode == 0, done.stderr
    lines = dict(line.strip().split("  ", 1) for line in done.stdout.splitlines() if "  " in line.strip())
    facts = {name: value.strip() for name, value in lines.items()}
    assert "cpu" in facts["devices"] or "gpu" in facts["devices"]
    assert facts["attention"]
    assert facts["KV of a token"] == f"{2 * 2 * 64 * 4:,} bytes in float32"
    assert facts["context"] == "8,192 tokens"
    assert facts["parameters"] == "115,264"
    assert facts["device tier"].endswith("tokens by default")


def test_info_of_kv_in_8_bits(checkpoint):
    done = pensieve("info", checkpoint, "--kv-dtype", "fp8_e4m3")
    assert f"{2 * 2 * 64 * 33 / 32:,.0f} bytes in fp8_e4m3" in done.stdout
    wrong = pensieve("info", checkpoint, "--kv-dtype", "fp8")
    assert wrong.returncode == 2
    assert "kv_dtype: got 'fp8', expected None or 'fp8_e4m3'" in wrong.stderr


def test_info_without_a_checkpoint(tmp_path):
    done = pensieve("info", cwd=tmp_path)
    assert done.returncode == 0
    assert "attention" in done.stdout
    assert "KV of a token" not in done.stdout


def test_convert_then_chat(checkpoint, tmp_path):
    done = pensieve("convert", checkpoint, tmp_path / "orbax")
    assert done.returncode == 0, done.stderr
    assert "converted" in done.stdout
    again = refused(2, "convert", checkpoint, tmp_path / "orbax")
    assert again.startswith("error: destination")
    assert len(again.splitlines()) == 1

    sizes = ("--device-pages", "16", "--host-pages", "4", "--max-tokens", "5", "--max-context", "256")
    answers = [pensieve("chat", path, *sizes, stdin="hello\n") for path in (checkpoint, tmp_path / "orbax")]
    assert all(answer.returncode == 0 for answer in answers), answers
    assert "cut off after 5 tokens" in answers[0].stdout
    without_id = [answer.stdout.split("> ", 1)[1] for answer in answers]
    assert without_id[0] == without_id[1]
    assert "PyTorch" not in answers[0].stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["chat", "nowhere"], "error: nowhere: no such file or folder"),
        (["info", "nowhere"], "error: nowhere: no such file or folder"),
        (["convert", "nowhere", "there"], "error: nowhere: no such file or folder"),
    ],
)
def test_no_such_checkpoint(command, message, tmp_path):
    assert refused(1, *command, cwd=tmp_path).splitlines() == [message]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "--temperature", "-1"], "temperature"),
        (["chat", "--temperature", "nan"], "temperature"),
        (["chat", "--top-p", "2"], "error: top_p: got 2.0, expected a number in (0, 1]"),
        (["chat", "--device-pages", "0"], "device-pages"),
        (["chat", "--policy", "fifo"], "retention-value"),
        (["chat", "--nonsense"], "No such option"),
        (["chat"], "error: CHECKPOINT: got none"),
        (["convert", "only-one"], "Missing argument"),
        (["demo", "--turns", "0"], "turns"),
        (["nonsense"], "No such command"),
    ],
)
def test_wrong_options(arguments, message, tmp_path):
    assert message in refused(2, *arguments, cwd=tmp_path)


def test_too_much_host_memory(checkpoint):
    text = refused(2, "chat", checkpoint, "--device-pages", "4", "--host-pages", 10**9)
    assert text.startswith("error: host_pages:")


def test_a_log_that_is_none(checkpoint, tmp_path):
    (tmp_path / "log").write_text("this is no database, however long one looks at it\n" * 100)
    text = refused(
        1, "chat", checkpoint, "--log", tmp_path / "log", "--device-pages", "4", "--host-pages", "0"
    )
    assert text.startswith("error:")
    assert len(text.splitlines()) == 1


def test_debug_shows_where(tmp_path):
    done = pensieve("info", "nowhere", "--debug", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "CheckpointError" in done.stderr
