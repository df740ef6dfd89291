"""``BenchWorkload``: requests that a benchmark gives to an engine at once, and the draw of W1, W2 and W3."""

from __future__ import annotations

import random
from dataclasses import dataclass

USUAL_WORKLOADS = ("W1", "W2", "W3")
NUM_REQUESTS = 32
"""Requests of W2."""


@dataclass(frozen=True)
class BenchWorkload:
    """Requests that arrive together, with prompts of random token ids and answers of fixed lengths."""

    figure: str
    """Measured rate in tokens/s: decoded tokens after the first (``decode``), output tokens (``batch``), or prompt tokens up to the first
    output token (``prefill``)."""
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def length(self) -> int:
        """Largest number of tokens of a prompt with its answer."""
        return max(len(prompt) + out for prompt, out in zip(self.prompts, self.output_lens, strict=True))


def draw_workloads(num_requests: int = NUM_REQUESTS) -> dict[str, BenchWorkload]:
    """W1, W2, W3, and W1 after a long prompt, by name; equal in every process.

    Args:
        num_requests: W2 has the first ``num_requests`` of its ``NUM_REQUESTS`` requests.
    """
    draw = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(10, 4000) for _ in range(tokens)]

    short, long = prompt(128), prompt(2048)
    lengths = [(draw.randint(64, 512), draw.randint(32, 128)) for _ in range(NUM_REQUESTS)]
    batch = [prompt(tokens) for tokens, _ in lengths]
    return {
        "W1": BenchWorkload("decode", [short], [128]),
        "W2": BenchWorkload("batch", batch[:num_requests], [out for _, out in lengths][:num_requests]),
        "W3": BenchWorkload("prefill", [long], [1]),
        "W1-4k": BenchWorkload("decode", [prompt(4000)], [128]),
        "W1-16k": BenchWorkload("decode", [prompt(16000)], [128]),
    }
