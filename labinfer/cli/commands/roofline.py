"""draw_roofline: roofline plot of a machine with measured functions (Williams et al. 2009, doi:10.1145/1498765.1498785)."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.cli.commands.plot_file import save_plot
from labinfer.functions.roofline_limits import RooflineLimits


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Measured performance of one implementation of a function, for one number of rows (tokens)."""

    function: str
    weights: str
    """Quantization of the weight matrices."""
    rows: int
    implementation: str
    seconds: float
    num_bytes: int
    operations: int
    memory: float
    """Used fraction of the machine's measured memory bandwidth; above 1 if the data are in a CPU cache, 0 if the bandwidth was not
    measured."""
    arithmetic: float
    """Used fraction of the machine's measured peak of operations per second."""
    is_chosen: bool
    """Whether a run would choose this implementation."""


def draw_roofline(path: str, figures: list[Figure], limits: RooflineLimits) -> None:
    """Draw a roofline plot: matrix products by arithmetic intensity, below the limits of memory bandwidth and
    arithmetic.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure as Canvas

    products = [figure for figure in figures if figure.operations]
    canvas = Canvas(figsize=(9, 6), layout="constrained")
    axes = canvas.add_subplot()
    for function, implementation in dict.fromkeys((figure.function, figure.implementation) for figure in products):
        mine = [figure for figure in products if (figure.function, figure.implementation) == (function, implementation)]
        axes.plot(
            [figure.operations / figure.num_bytes for figure in mine],
            [figure.operations / figure.seconds / 1e9 for figure in mine],
            marker="o",
            label=f"{function} {implementation}",
        )
    intensities = [figure.operations / figure.num_bytes for figure in products]
    low, high = min(intensities) / 2, max(intensities) * 2
    for name, rate in limits.arithmetic_rates().items():
        if limits.memory:
            ridge = min(max(rate / limits.memory, low), high)
            roof = [min(rate, limits.memory * at) / 1e9 for at in (low, ridge, high)]
            axes.plot((low, ridge, high), roof, color="grey", linewidth=1)
            axes.annotate(name, (high, roof[-1]), ha="right", va="bottom", color="grey")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    axes.legend(fontsize="small")
    save_plot(path, canvas)
