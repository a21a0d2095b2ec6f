"""Versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version


def package_version(name: str) -> str:
    """The version of an installed package, or that it isn't installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
