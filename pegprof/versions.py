"""Versions of installed packages, without importing them."""

from importlib import metadata


def version_of(distribution: str) -> str | None:
    """
    >>> version_of("no-such-package") is None
    True
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
