"""Packages that offer models, installed into a folder as pip would: a module and its metadata."""

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, package: str, source: str, models: Mapping[str, str]) -> None:
    """A package of one module. ``models`` are its entry points: from names to ``module:attribute``."""
    (folder / f"{package}.py").write_text(source)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in models.items()]
    (info / "entry_points.txt").write_text("\n".join(["[pegprof.models]", *lines]))
