"""A folder of compiled programs, which a later start finds without tracing them.

JAX keeps compiled programs, too, but looks for them by what they were lowered to, and tracing and lowering
take most of a start's time. Here a program is found by what it was made from.
"""

import hashlib
import importlib
import json
import logging
import os
import pickle
import platform
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from pallas_kernels.dispatch import RUNS_HERE
from pensieve_jax.models.interface import ModelSpec
from pensieve_jax.versions import package_versions, processor, processor_features
from pensieve_jax.worker.step_functions import Part, StepFunctions

logger = logging.getLogger(__name__)

MOST_BYTES = 4 << 30
"""Bytes that a folder may take; the programs that were not used for longest go."""

SOURCES = ("pensieve_jax", "host_cache", "pallas_kernels")
"""Packages whose code programs are traced from."""

PACKAGES = ("jax", "flax", "numpy", "triton", "nvidia-")
"""Beginnings of the names of packages that trace, lower, compile, or are called by what was compiled."""

OURS = ("pensieve_jax.", "flax.")
"""Where everything that a model is made of must come from, so that its code is known."""

VARIABLES = ("XLA_", "TF_XLA_", "MOSAIC_", "TRITON_", "NVIDIA_TF32_OVERRIDE")
"""Beginnings of the environment variables that tracing and compiling heed."""

WITHOUT_EFFECT = frozenset({"cache", "log", "logging", "traceback", "dump", "dumps", "platforms"})
"""Words in the names of JAX's settings that change no program. Devices are in the key by themselves."""

_JAX_CACHE = threading.Lock()
"""Held while JAX's own cache is off."""


class ProgramStore:
    """The compiled programs of one model on some devices, in a folder that several may share.

    Whoever can write to the folder can run code in this process.
    """

    def __init__(self, folder: Path, mesh: Mesh, made_from: str, *, most_bytes: int = MOST_BYTES) -> None:
        """Args:
        folder: made if it isn't there.
        mesh: the devices to load for.
        made_from: what all programs depend on, beside their names and arguments.
        most_bytes: of the whole folder.
        """
        self._folder = folder
        self._devices = list(mesh.devices.flat)
        self._made_from = made_from
        self._most_bytes = most_bytes
        self.filling = False
        """Whether programs are to be taken from here, or compiled into it: see `fill`."""

    @contextmanager
    def fill(self) -> Iterator[None]:
        """While it lasts, programs that aren't ready are taken from here, or compiled and kept.

        JAX's own cache is off meanwhile: what XLA has read from it for a CPU comes without its code when it
        is written again.
        """
        with _JAX_CACHE:
            before = jax.config.jax_enable_compilation_cache
            _enable_jax_cache(False)
            self.filling = True
            try:
                yield
            finally:
                self.filling = False
                _enable_jax_cache(before)

    def load(self, name: str, args: Sequence[Any]) -> jax.stages.Compiled | None:
        """The program that was kept under this name for arguments like these; None if there is none."""

        def revive(kept: tuple) -> jax.stages.Compiled:
            return serialize_executable.deserialize_and_load(*kept, execution_devices=self._devices)

        return self._read(self._path(name, args), revive)

    def save(self, name: str, args: Sequence[Any], compiled: jax.stages.Compiled) -> None:
        """Keep a program. What can't be kept is compiled again at the next start."""
        self._write(self._path(name, args), lambda: serialize_executable.serialize(compiled))

    def recall[T](self, name: str, args: Sequence[Any], find_out: Callable[[], T]) -> T:
        """What was found out under this name for arguments like these, now or at an earlier start."""
        path = self._path(name, args)
        known = self._read(path, lambda kept: kept)
        if known is None:
            known = find_out()
            self._write(path, lambda: known)
        return known

    def _read[T](self, path: Path, revive: Callable[[Any], T]) -> T | None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("what was compiled can't be read: %s", error)
            return None
        try:
            value = revive(pickle.loads(zlib.decompress(content)))
        except Exception as error:  # noqa: BLE001 (whatever the bytes have become)
            logger.warning("%s is damaged and compiled anew: %s", path, error)
            return None
        with suppress(OSError):
            os.utime(path)
        return value

    def _write(self, path: Path, give: Callable[[], Any]) -> None:
        try:
            content = zlib.compress(pickle.dumps(give()), level=1)
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(content)
            Path(file.name).replace(path)
            self._make_room()
        except Exception as error:  # noqa: BLE001 (a full disk, a program that can't be serialized)
            logger.warning("%s isn't kept: %s", path, error)

    def _path(self, name: str, args: Sequence[Any]) -> Path:
        leaves, tree = jax.tree.flatten(args)
        described = "\n".join([self._made_from, name, str(tree), *map(_description, leaves)])
        return self._folder / f"{name}-{hashlib.sha256(described.encode()).hexdigest()}"

    def _make_room(self) -> None:
        files = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process makes room, too
                files.append((path.stat().st_mtime, path.stat().st_size, path))
        excess = sum(size for _, size, _ in files) - self._most_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size


def open_store(folder: Path | None, spec: ModelSpec, functions: StepFunctions) -> ProgramStore | None:
    """The store of a model's programs; None if they must not be kept.

    Only code of this project is known to be the same as when a program was traced. A model with other
    modules, or with functions or objects of others among its attributes, is traced at every start.

    Args:
        folder: where to keep programs; None: nowhere.
        spec: of the model.
        functions: of its steps.
    """
    kinds, mesh = functions.kinds, functions.mesh
    if folder is None or not all(map(_is_ours, kinds)):
        return None
    devices = [(device.id, device.device_kind, device.platform) for device in mesh.devices.flat]
    parts = [(_names(part), part) for part in kinds]
    made_from = (environment(), devices, spec, parts, functions.kind_of)
    return ProgramStore(folder, mesh, "\n".join(map(repr, made_from)))


def environment() -> str:
    """What programs depend on beside model and devices: code, versions, settings and drivers, as JSON."""
    client = jax.devices()[0].client
    driver = Path("/proc/driver/nvidia/version")
    settings = [name for name in jax.config.values if WITHOUT_EFFECT.isdisjoint(name.split("_"))]
    return json.dumps(
        {
            "source": source_digest(),
            "versions": {"python": platform.python_version(), **package_versions(PACKAGES)},
            "platform": [client.platform, client.platform_version],
            "processor": [processor(), processor_features()],
            "driver": driver.read_text() if driver.exists() else None,
            "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
            "settings": {name: repr(getattr(jax.config, name, None)) for name in sorted(settings)},
            "implementations": {name: runs_here() for name, runs_here in RUNS_HERE.items()},
        }
    )


@cache
def source_digest() -> str:
    """A digest of all files of `SOURCES`."""
    digest = hashlib.sha256()
    for package in SOURCES:
        folder = Path(importlib.import_module(package).__path__[0])
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{package}/{path.relative_to(folder)} {path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _enable_jax_cache(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # which looks at the setting only once


def _description(leaf: Any) -> str:
    sharding = repr(leaf.sharding) if hasattr(leaf, "sharding") else "host"
    weak = getattr(leaf, "weak_type", False)
    return f"{leaf.shape} {leaf.dtype} {weak} {sharding}"


def _names(part: Part) -> list[str]:
    defined = nnx.graphlib.NodeDef, nnx.graphlib.VariableDef  # others refer to these
    types = [node.type for node in part.graph.nodes if isinstance(node, defined)]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in types]


def _is_ours(part: Part) -> bool:
    values = [value.value for _, value in part.graph.attributes if isinstance(value, nnx.graphlib.Static)]
    return all(name.startswith(OURS) for name in _names(part)) and all(map(_is_told_by_repr, values))


def _is_told_by_repr(value: Any) -> bool:
    """Whether what a value's repr shows is all that it is: not so of functions."""
    kind = f"{type(value).__module__}."
    return kind.startswith(OURS) or (kind == "builtins." and not callable(value))
