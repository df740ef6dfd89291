"""StepShape: the sizes that determine the time of a step."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.plan import BatchPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    """Size of a micro-batch, which determines the time of its step on each stage. Numbers are integers for a plan, and may be means
    for a forecast."""

    num_decodes: float = 0
    """Number of sequences that decode one token each."""
    decode_context: float = 0
    """Context tokens of all decodes together, the new tokens included."""
    chunks: tuple[tuple[float, float], ...] = ()
    """Prefill chunks, and decodes of several tokens at once: for each, its number of tokens, and the number of earlier tokens of
    the sequence."""
    num_samples: float = 0
    """Rows for which the last stage computes logits and samples a token."""

    @property
    def rows(self) -> float:
        """Number of tokens of the micro-batch."""
        return self.num_decodes + sum(tokens for tokens, _ in self.chunks)

    @property
    def num_sequences(self) -> float:
        return self.num_decodes + len(self.chunks)

    def seen_by_decodes(self, window: int = 0) -> float:
        """Context tokens of all decodes together, at most ``window`` each; all if ``window`` is 0."""
        return min(self.decode_context, self.num_decodes * window) if window else self.decode_context

    @classmethod
    def from_plan(cls, plan: BatchPlan) -> StepShape:
        num_decodes = context = 0
        chunks = []
        for entry in plan.entries:
            if entry.is_decode and entry.num_tokens == 1:
                num_decodes += 1
                context += entry.position + 1
            else:
                chunks.append((entry.num_tokens, entry.position))
        return cls(num_decodes, context, tuple(chunks), plan.num_samples)


def tokens_seen(tokens: float, before: float, window: int = 0) -> float:
    """Number of pairs of a token of a chunk and a token that it attends to. A token attends to ``before`` earlier tokens and on
    average half the chunk, but to ``window`` tokens at most.

    Args:
        window: sliding window in tokens; 0 for none.
    """
    inside = min(tokens, max(0.0, window - before)) if window else tokens
    return inside * (before + inside / 2) + (tokens - inside) * window
