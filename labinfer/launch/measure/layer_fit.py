"""fit_layer: costs of a layer, fitted to times of steps that differ in one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from labinfer.planner.costs import LayerCosts, Points
from labinfer.planner.step_shape import StepShape, tokens_seen

HEAD_ROWS = (1, 8, 9, 32, 64)
"""Numbers of sampled rows for which the LM head is timed."""
DECODE_ROWS = (1, 2, 4, 8, 9, 16, 32, 33, 64)
"""Batch sizes of timed decode steps, on both sides of every size at which implementations change."""
CHUNK_ROWS = (128, 129, 256, 512)
"""Chunk sizes, in tokens, of timed prefill steps."""
FEW_TOKENS = 64
"""Context length, in tokens, of the sequences in timed steps that do not measure attention."""
CONTEXTS = ((1, 4096), (8, 1024), (64, 1024))
"""Batch sizes and context lengths of timed steps that measure decode attention."""
ATTENTION_FRACTION = 0.5
"""Largest fraction of a short-context step that counts as attention. In small models attention costs more per token in short steps
than in long ones; without this bound the fit would leave no time for the rest of the layer."""
CHUNK_BEFORE = (256, 3584)
"""Chunk size, and tokens before the chunk, of the step that measures prefill attention."""


def fit_layer(seconds: Callable[[StepShape], float], *, most_decodes: int, length: int, window: int = 0) -> LayerCosts:
    """Fit the costs of a layer to times of steps that differ in one parameter at a time.

    The constant part of attention, which does not depend on the context length, counts as work per row.

    Args:
        seconds: time of a layer in a step: of decodes of equal context length, or of one chunk.
        most_decodes: maximum batch size of a step.
        length: maximum length of a sequence.
        window: sliding window in tokens; 0 for full attention.
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
    """Slope, at least 0, of the least-squares line through the origin, with relative errors.

    Args:
        points: size, seconds, and the seconds to which the error is relative.
    """
    points = [(size / base, time / base) for size, time, base in points]
    return max(0.0, sum(x * y for x, y in points) / (sum(x * x for x, _ in points) or 1.0))


def _bound(slope: float, points: Sequence[tuple[float, float]]) -> float:
    """``slope``, limited so that attention takes at most ``ATTENTION_FRACTION`` of every short-context step.

    Args:
        points: tokens that attention sees in a step, and the step's seconds.
    """
    return max(0.0, min([slope, *(ATTENTION_FRACTION * time / size for size, time in points)]))


def make_points(seconds: Mapping[int, float]) -> Points:
    """Cost points of seconds by size; negative values (noise) become 0."""
    return Points([float(size) for size in seconds], [max(0.0, time) for time in seconds.values()])
