"""What runs here: versions of packages, the processor."""

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path


def package_version(name: str) -> str:
    """The version of an installed package, or that it isn't installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


@cache
def package_versions(beginnings: tuple[str, ...]) -> Mapping[str, str]:
    """The versions of the installed packages whose names begin with one of these."""
    found = {package.name.lower(): package.version for package in distributions()}
    return {name: found[name] for name in sorted(found) if name.startswith(beginnings)}


def processor() -> str:
    """The name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    names = [t for t in info.read_text().splitlines() if t.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


def processor_features() -> str:
    """What this machine's processor can do, as far as the system says."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
