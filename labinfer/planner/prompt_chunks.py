"""prompt_chunks: the sizes of the chunks in which the scheduler prefills a prompt. Calls the scheduler's batch policy."""

from __future__ import annotations

import math
from typing import Protocol

from labinfer.engine.policies import MIN_PREFILL_TOKENS, SchedulerState, resolve_batch_policy

QUEUED_TOKENS = 1 << 30
"""Number of queued prompt tokens to assume if requests are always waiting."""
ROUNDING_TOKENS = 1e-6
"""Number of tokens below which the rest of a prompt is a rounding error."""


class ChunkLimits(Protocol):
    """Scheduler options that determine chunk sizes."""

    max_num_batched_tokens: int
    chunked_prefill_size: int


def prompt_chunks(
    prompt: float, limits: ChunkLimits, *, num_stages: int, num_batches: int, num_decodes: float, others_wait: bool
) -> list[float]:
    """Tokens of each prefill chunk of a prompt.

    Args:
        num_batches: micro-batches in flight.
        num_decodes: decode tokens in each micro-batch.
        others_wait: whether more prompts are queued when this one is admitted; affects only the first chunk.
    """
    policy = resolve_batch_policy("auto", num_stages)
    most = max(1.0, min(limits.chunked_prefill_size, limits.max_num_batched_tokens - num_decodes))
    if most <= MIN_PREFILL_TOKENS:  # no batch policy makes smaller chunks than MIN_PREFILL_TOKENS
        count = math.ceil(prompt / most)
        return [prompt / count] * count
    chunks: list[float] = []
    left = prompt
    while left > ROUNDING_TOKENS:
        state = SchedulerState(
            num_decoding=math.ceil(num_decodes * num_batches),
            prefill_tokens=math.ceil(left) + (QUEUED_TOKENS if others_wait and not chunks else 0),
            free_fraction=1.0,
            num_micro_batches=num_batches,
            max_tokens=limits.max_num_batched_tokens,
            was_prefilling=bool(chunks),
        )
        chunks.append(min(left, most, policy(state).num_prefill_tokens))
        left -= chunks[-1]
    return chunks
