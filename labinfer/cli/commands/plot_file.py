"""Image files drawn by matplotlib. check_plot checks their paths before a measurement starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from labinfer.base.errors import UserError
from labinfer.observe.output_file import OutputFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".pdf", ".svg")
"""Supported file formats of plots."""


def check_plot(path: str, others: dict[str, str] | None = None) -> None:
    """Check that a plot can be written to ``path``.

    Args:
        others: paths of the command's other files, by option; ``path`` must not be one of them.

    Raises:
        UserError: matplotlib is missing, the suffix is not in ``SUFFIXES``, or the file cannot be written.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UserError(f"--plot {path}: the file name must end in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib; run pip install matplotlib")
    OutputFile(path, "--plot", others).close()


def save_plot(path: str, canvas: Figure) -> None:
    """Write a figure to ``path``.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        canvas.savefig(path)
    except OSError as error:
        raise UserError(f"cannot write --plot {path}: {error.strerror}") from None
