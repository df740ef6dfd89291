"""StepShape: the sizes on which the time of a step depends."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.plan import BatchPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    """Work of a micro-batch on each stage. Numbers are whole for a plan; a forecast's are means."""

    num_decodes: float = 0
    """Sequences that run one generated token each."""
    decode_context: float = 0
    """Tokens that these see, themselves included, summed over them."""
    chunks: tuple[tuple[float, float], ...] = ()
    """Parts of prompts, and generated tokens that run several at once: tokens, and tokens of the sequence before them."""
    num_samples: float = 0
    """Rows for which the last stage computes logits and samples."""

    @property
    def rows(self) -> float:
        """Tokens of the micro-batch."""
        return self.num_decodes + sum(tokens for tokens, _ in self.chunks)

    @property
    def num_sequences(self) -> float:
        return self.num_decodes + len(self.chunks)

    def seen_by_decodes(self, window: int = 0) -> float:
        """Tokens that the decodes see, summed over them, each a window at most; 0 for none."""
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
    """Tokens that those of a chunk see, summed over them: each what is before the chunk and half of it, and at most a window.

    Args:
        window: 0 for none.
    """
    inside = min(tokens, max(0.0, window - before)) if window else tokens
    return inside * (before + inside / 2) + (tokens - inside) * window
