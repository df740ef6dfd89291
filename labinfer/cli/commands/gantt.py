"""The Gantt chart of a benchmark's steps, drawn for print: readable without colours, with letters of 8 points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labinfer.cli.commands.plot_file import save_plot
from labinfer.observe.gantt import Gantt, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 7.0
"""Width of the chart in inches: the text width of a page."""
ROW, GAP = 0.42, 0.12
"""Height of a rank's row, and gap between two stages, in inches."""
BAR = 0.8
"""Height of a bar, as a fraction of ``ROW``."""
BAR_STYLES = {"prefill": ("#E69F00", "////"), "decode": ("#56B4E9", ""), "mixed": ("#F0E442", "xxxx")}
"""Colour and hatch of each kind of micro-batch. Colours are from Okabe and Ito's palette for the colour-blind
(https://jfly.uni-koeln.de/color/)."""
OUTLINE = 0.4
"""Line width of a bar's outline, in points."""
MIN_OUTLINED = 0.004
"""Minimum duration of a micro-batch whose bar gets an outline, as a fraction of the chart's duration: about 1.6 points."""
WAIT_COLOUR, WAIT_WIDTH = "0.7", 1.0
FONT_SIZE = 8
DIGIT_WIDTH, DIGIT_HEIGHT = 0.64, 0.8
"""Width and height of a digit in DejaVu Sans (matplotlib's default font), as a fraction of the font size."""
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": FONT_SIZE,
    "hatch.linewidth": 0.4,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,  # TrueType: publishers refuse matplotlib's default, type 3 fonts
}
NANOSECONDS = 1e6
"""Number of nanoseconds in a millisecond."""
POINTS = 72
"""Typographic points per inch, the unit of line widths and fonts."""


def draw_gantt(path: str, gantt: Gantt, title: str) -> None:
    """Draw the chart, with a row for each rank: bars are micro-batches, lines are waits, and white is other time.

    Raises:
        UserError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    places = row_places(gantt.rows)
    with matplotlib.rc_context(STYLE):
        canvas = Figure(figsize=(WIDTH, places[-1] + ROW / 2 + 1.1), dpi=300, layout="constrained")
        axes = canvas.add_subplot()
        axes.set(xlim=(0, gantt.duration / NANOSECONDS), ylim=(places[-1] + ROW / 2, -ROW / 2), xlabel="time (ms)")
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.set_yticks(places, [row_label(row) for row in gantt.rows])
        axes.tick_params(axis="y", length=0)
        for place, row in zip(places, gantt.rows, strict=True):
            _draw_row(axes, place, row, MIN_OUTLINED * gantt.duration)
            share = f"busy {100 * row.busy:.1f} %\nbubble {100 * (1 - row.busy):.1f} %"
            axes.text(1.01, place, share, transform=axes.get_yaxis_transform(), va="center")
        first, last = gantt.steps[0], gantt.steps[-1]
        numbers = f"steps {first} to {last} of the run, numbered from 1" if last > first else f"step {first} of the run"
        axes.set_title(f"{title}\n{numbers}", loc="left", fontsize=FONT_SIZE, parse_math=False)
        canvas.legend(
            handles=_legend(gantt),
            loc="outside lower center",
            ncols=4,
            frameon=False,
            handletextpad=0.5,
            columnspacing=1.5,
        )
        canvas.draw_without_rendering()  # sets the widths of the bars, which the layout of the figure determines
        _write_numbers(axes, places, gantt)
        save_plot(path, canvas)


def row_places(rows: list[Row]) -> list[float]:
    """Vertical centre of each row, in inches from the centre of the first row."""
    places = [0.0]
    for before, row in zip(rows, rows[1:], strict=False):
        places.append(places[-1] + ROW + GAP * (row.stage != before.stage))
    return places


def row_label(row: Row) -> str:
    return f"stage {row.stage}\nrank {row.rank}"


def _draw_row(axes: Axes, place: float, row: Row, thinnest: float) -> None:
    """Draw the bars and waits of one rank.

    Args:
        thinnest: minimum duration, in nanoseconds, of a bar that gets an outline; the outline would hide a thinner bar.
    """
    height = BAR * ROW
    begins, ends = ([wait[at] / NANOSECONDS for wait in row.waits] for at in (0, 1))
    axes.hlines([place] * len(begins), begins, ends, color=WAIT_COLOUR, linewidth=WAIT_WIDTH, zorder=0.5)
    for kind, (colour, hatch) in BAR_STYLES.items():
        bars = [bar for bar in row.bars if bar.kind == kind]
        spans = [(bar.begin / NANOSECONDS, (bar.end - bar.begin) / NANOSECONDS) for bar in bars]
        outlines = [OUTLINE if bar.end - bar.begin >= thinnest else 0 for bar in bars]
        where = (place - height / 2, height)
        axes.broken_barh(spans, where, facecolor=colour, hatch=hatch, edgecolor="black", linewidth=outlines)


def _legend(gantt: Gantt) -> list:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list = []
    for kind, (fewest, most) in gantt.num_tokens.items():
        colour, hatch = BAR_STYLES[kind]
        count = f"{fewest}" if fewest == most else f"{fewest}–{most}"
        label = f"{kind} ({count} token{'s' * (most > 1)})"
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=OUTLINE, label=label))
    if any(row.waits for row in gantt.rows):
        handles.append(Line2D([], [], color=WAIT_COLOUR, linewidth=WAIT_WIDTH, label="waiting"))
    return handles


def _write_numbers(axes: Axes, places: list[float], gantt: Gantt) -> None:
    """Write step numbers into the bars that are wide enough. The numbers are rotated if then at least 1.5 times as many bars are
    wide enough."""
    from matplotlib.patheffects import withStroke

    points = axes.get_window_extent().width / axes.figure.dpi * POINTS / gantt.duration  # inches per nanosecond
    numbers = {step: str(number) for number, step in enumerate(gantt.steps, 1)}
    bars = [
        (place, bar, numbers[bar.step_id], (bar.end - bar.begin) * points)
        for place, row in zip(places, gantt.rows, strict=True)
        for bar in row.bars
        if bar.step_id in numbers
    ]
    level = [bar for bar in bars if bar[3] >= FONT_SIZE * DIGIT_WIDTH * len(bar[2])]
    upright = [bar for bar in bars if bar[3] >= FONT_SIZE * DIGIT_HEIGHT]
    is_upright = len(upright) >= 1.5 * len(level)
    for place, bar, number, _ in upright if is_upright else level:
        colour, hatch = BAR_STYLES[bar.kind]
        axes.text(
            (bar.begin + bar.end) / 2 / NANOSECONDS,
            place,
            number,
            ha="center",
            va="center_baseline",
            rotation=90 if is_upright else 0,
            rotation_mode="anchor",
            path_effects=[withStroke(linewidth=3, foreground=colour)]
            if hatch
            else [],  # an edge in the bar's colour keeps the number readable on the hatch
            in_layout=False,
        )
