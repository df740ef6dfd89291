"""fit_layer: the costs of a layer from steps of which each differs from another one in one thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from labinfer.planner.costs import LayerCosts, Points
from labinfer.planner.step_shape import StepShape, tokens_seen

HEAD_ROWS = (1, 8, 9, 32, 64)
"""Sampled rows."""
DECODE_ROWS = (1, 2, 4, 8, 9, 16, 32, 33, 64)
"""Sequences of steps that decode: both sides of every size at which implementations change."""
CHUNK_ROWS = (128, 129, 256, 512)
"""Tokens of chunks of a prompt."""
FEW_TOKENS = 64
"""Context of the sequences in steps whose attention is not what is measured."""
CONTEXTS = ((1, 4096), (8, 1024), (64, 1024))
"""Sequences and the context of each, in steps that measure the attention of decodes."""
ATTENTION_FRACTION = 0.5
"""Largest fraction of the time of a step with few tokens that counts as attention. In small models attention costs more per token
in short steps than in long ones; without this bound the fit would leave no time for the rest of the layer."""
CHUNK_BEFORE = (256, 3584)
"""Tokens of a chunk and those before it, in the step that measures the attention of chunks."""


def fit_layer(seconds: Callable[[StepShape], float], *, most_decodes: int, length: int, window: int = 0) -> LayerCosts:
    """Costs of a layer, from steps of which each differs from another one in one thing.

    What a decode's or a chunk's attention takes however few tokens are seen counts as work by rows.

    Args:
        seconds: a layer's part of a step of decodes that see as many tokens each, or of one chunk.
        most_decodes: sequences that a step can have.
        length: tokens that a sequence can have.
        window: tokens that a token sees at most; 0 for all.
    """
    few, reach = min(FEW_TOKENS, length), window or length
    by_rows = {rows: seconds(StepShape(rows, rows * few)) for rows in DECODE_ROWS if rows <= most_decodes}
    per_token = _slope(
        [
            (
                rows * (min(context, reach) - few),
                seconds(StepShape(rows, rows * context)) - by_rows[rows],
                by_rows[rows],
            )
            for rows, context in ((rows, min(context, length)) for rows, context in CONTEXTS)
            if rows in by_rows and min(context, reach) > few
        ]
    )
    chunks = {rows: seconds(StepShape(chunks=((rows, 0),))) for rows in CHUNK_ROWS if rows <= length}
    size, before = CHUNK_BEFORE[0], min(CHUNK_BEFORE[1], length - CHUNK_BEFORE[0])
    per_pair, seen = 0.0, tokens_seen(size, before, window) - tokens_seen(size, 0, window)
    if size in chunks and before > 0 and seen > 0:
        more = seconds(StepShape(chunks=((size, before),))) - chunks[size]
        per_pair = _slope([(seen, more, chunks[size])])
    per_token = _bound(per_token, [(rows * min(few, reach), time) for rows, time in by_rows.items()])
    per_pair = _bound(per_pair, [(tokens_seen(rows, 0, window), time) for rows, time in chunks.items()])
    linear = {rows: time - per_token * rows * min(few, reach) for rows, time in by_rows.items()}
    linear |= {rows: time - per_pair * tokens_seen(rows, 0, window) for rows, time in chunks.items()}
    attention = {"decode": (0.0, 0.0, per_token), "chunk": (0.0, 0.0, per_pair)}
    return LayerCosts(linear=make_points(linear), small=Points([], []), **attention, window=window)


def _slope(points: Sequence[tuple[float, float, float]]) -> float:
    """Slope of the line through 0 with the least squares of relative errors, at least 0.

    Args:
        points: size, seconds, and the seconds that the error of these is compared with.
    """
    points = [(size / base, time / base) for size, time, base in points]
    return max(0.0, sum(x * y for x, y in points) / (sum(x * x for x, _ in points) or 1.0))


def _bound(slope: float, points: Sequence[tuple[float, float]]) -> float:
    """A slope, or the largest one that gives attention ``ATTENTION_FRACTION`` of every step with few tokens.

    Args:
        points: tokens seen in such a step, and its seconds.
    """
    return max(0.0, min([slope, *(ATTENTION_FRACTION * time / size for size, time in points)]))


def make_points(seconds: Mapping[int, float]) -> Points:
    """Points of seconds by size; what noise makes of them is at least 0."""
    return Points([float(size) for size in seconds], [max(0.0, time) for time in seconds.values()])
