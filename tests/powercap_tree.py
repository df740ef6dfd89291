"""A make-believe powercap tree: the files that the kernel has for each energy counter."""

from __future__ import annotations

import os
from pathlib import Path


def make_zone(root: Path, zone: str, name: str, joules: float, whole: float = 1000.0) -> Path:
    """Make a zone as the kernel does, ``whole`` joules before it wraps around."""
    folder = root / zone
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{round(whole * 1e6)}\n")
    set_joules(folder, joules)
    return folder


def set_joules(folder: Path, joules: float) -> None:
    """Change a counter at once, so that no reader finds an empty file."""
    new = folder / "new"
    new.write_text(f"{round(joules * 1e6)}\n")
    os.replace(new, folder / "energy_uj")
