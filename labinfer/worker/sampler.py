"""Sampler: from logits to token ids, by logits processors, masks and greedy or random choice."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from labinfer.base.plan import NO_TOKEN, TokenLogprobs
from labinfer.base.sampling_params import GREEDY_BELOW
from labinfer.functions.draw import Draw
from labinfer.functions.functions import Functions
from labinfer.worker.logits_processors.processor import LogitsProcessor, SampledRow

NEVER = float("-inf")
UNLIKELY = -1e30
"""Logit that replaces -inf of the model itself, so that such a token can be sampled if nothing else is allowed."""
MIN_TOKENS = "min_tokens"
"""Logits processor that forbids stop tokens at the beginning of an answer."""


class Sampler:
    """Samples the next token of every row.

    Args:
        processors: logits processors that rows may name.
        functions: implementations of ``argmax`` and ``sample``.
    """

    def __init__(self, processors: Mapping[str, LogitsProcessor], functions: Functions):
        self._processors = processors
        self._argmax, self._sample = functions.argmax, functions.sample

    def __call__(self, logits_BV: torch.Tensor, rows: list[SampledRow]) -> list[int]:
        """Sample a token id for each row: ``NO_TOKEN`` if its processors and its mask together forbid every token.

        Args:
            logits_BV: unscaled, any float type.
            rows: sampling parameters, prefix and mask of each row.
        """
        # Beams use log-probabilities only: their logits are processed when these are computed.
        changed = [
            b
            for b, row in enumerate(rows)
            if (row.sampling.processors or row.mask) and not row.sampling.after_processors
        ]
        tokens = self._choose(logits_BV, {b: row for b, row in enumerate(rows) if b not in changed})
        if changed:
            processed = {b: self._process(logits_BV[b].float(), rows[b]) for b in changed}
            tokens |= {b: NO_TOKEN for b, logits_V in processed.items() if logits_V is None}
            changed = [b for b in changed if b not in tokens]
        if changed:
            chosen = self._choose(
                torch.stack([processed[b] for b in changed]), {index: rows[b] for index, b in enumerate(changed)}
            )
            tokens |= {changed[index]: token for index, token in chosen.items()}
        return [tokens[b] for b in range(len(rows))]

    def process(self, logits_V: torch.Tensor, row: SampledRow) -> torch.Tensor:
        """Logits of a row after its logits processors and its mask, float32: all -inf if every token is forbidden."""
        processed_V = self._process(logits_V, row)
        return torch.full_like(logits_V, NEVER) if processed_V is None else processed_V

    def _process(self, logits_V: torch.Tensor, row: SampledRow) -> torch.Tensor | None:
        """Logits of a row after its logits processors and its mask; None if these forbid every token.

        No constraint is dropped, with one exception: ``min_tokens`` yields to a mask, as a complete structured output
        must be able to end.
        """
        if not row.sampling.processors and not row.mask:
            return logits_V
        processed_V = self._apply(logits_V, row)
        if (largest := processed_V.max()) > NEVER:
            return processed_V
        assert not largest.isnan() or logits_V.isnan().any(), (
            f"the logits processors {', '.join(name for name, _ in row.sampling.processors)} make logits NaN"
        )
        logits_V = logits_V.clamp(min=UNLIKELY)
        for omitted in ("", MIN_TOKENS)[: 1 + bool(row.mask)]:
            processed_V = self._apply(logits_V, row, omitted)
            if (processed_V != NEVER).any():  # logits that are NaN are not forbidden
                return processed_V
        return None

    def _apply(self, logits_V: torch.Tensor, row: SampledRow, omitted: str = "") -> torch.Tensor:
        """Copy of ``logits_V`` after each of the row's processors but ``omitted``.

        The row's mask is applied before them, so that a processor that keeps the largest logits keeps allowed tokens,
        and after them, so that none restores a forbidden token.
        """
        processed_V = logits_V.clone()
        forbidden_V = ~read_mask(row.mask, logits_V.shape[0]).to(logits_V.device) if row.mask else None
        if forbidden_V is not None:
            processed_V.masked_fill_(forbidden_V, NEVER)
        for name, value in row.sampling.processors:
            if name != omitted:
                self._processors[name](processed_V, value, row)
        if forbidden_V is not None and row.sampling.processors:
            processed_V.masked_fill_(forbidden_V, NEVER)
        return processed_V

    def _choose(self, logits_BV: torch.Tensor, rows: Mapping[int, SampledRow]) -> dict[int, int]:
        """Choose the tokens of some rows of the logits: greedy, or sampled with a temperature."""
        draws = [
            Draw(b, len(row.token_ids), row.sampling)
            for b, row in rows.items()
            if row.sampling.temperature >= GREEDY_BELOW
        ]
        drawn = self._sample(logits_BV, draws) if draws else []
        tokens = {draw.row: token for draw, token in zip(draws, drawn, strict=True)}
        if len(tokens) < len(rows):
            largest = self._argmax(logits_BV).tolist()
            tokens = {b: tokens.get(b, largest[b]) for b in rows}
        return tokens


def read_mask(mask: bytes, vocab_size: int) -> torch.Tensor:
    """Decode a mask of ``BatchEntry`` into allowed tokens: bool (V)."""
    bits_V = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(bits_V).view(torch.bool)


def measure(
    logprobs_BV: torch.Tensor, token_ids: list[int], tops: list[int], with_ranks: bool = False
) -> list[TokenLogprobs]:
    """Log-probability of each row's token, with the ``tops[b]`` likeliest tokens of row ``b``.

    Args:
        with_ranks: whether to compute the rank of each token.
    """
    logprobs_B1 = logprobs_BV[range(len(token_ids)), token_ids][:, None]
    ranks_B = ((logprobs_BV > logprobs_B1).sum(dim=1) + 1).tolist() if with_ranks else [0] * len(token_ids)
    logprobs_B = logprobs_B1[:, 0].tolist()
    top_BN, ids_BN = (part.tolist() for part in logprobs_BV.topk(max(tops)))
    return [
        TokenLogprobs(token_id, logprob, dict(zip(ids_N[:top], top_N[:top], strict=True)), rank)
        for token_id, logprob, rank, ids_N, top_N, top in zip(
            token_ids, logprobs_B, ranks_B, ids_BN, top_BN, tops, strict=True
        )
    ]
