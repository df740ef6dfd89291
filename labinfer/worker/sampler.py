"""Sampler: from logits to token ids, by logits processors, masks and greedy or random choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from labinfer.base.plan import NO_TOKEN, TokenLogprobs
from labinfer.base.sampling_params import GREEDY_BELOW
from labinfer.functions.attention_batch import int64_tensor
from labinfer.functions.draw import Draw
from labinfer.functions.functions import Functions
from labinfer.worker.host_copies import HostCopies
from labinfer.worker.logits_processors.processor import LogitsProcessor, SampledRow

NEVER = float("-inf")
UNLIKELY = -1e30
"""Logit that replaces -inf of the model itself, so that such a token can be sampled if nothing else is allowed."""
MIN_TOKENS = "min_tokens"
"""Logits processor that forbids stop tokens at the beginning of an answer."""
Banned = torch.Tensor | None
"""Tokens outside a row's mask of allowed tokens, bool (V), on the device of the logits; None without a mask."""


class Sampler:
    """Samples the next token of every row.

    Args:
        processors: logits processors that rows may name.
        functions: implementations of ``argmax`` and ``sample``.
        copies: copies between the device and the host.
    """

    def __init__(self, processors: Mapping[str, LogitsProcessor], functions: Functions, copies: HostCopies):
        self._processors, self._copies = processors, copies
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
            banned = dict(zip(changed, self._banned([rows[b] for b in changed], logits_BV), strict=True))
            processed_BV = torch.stack([self._apply(logits_BV[b].float(), rows[b], banned[b]) for b in changed])
            left: dict[int, SampledRow] = {}
            largest_B = processed_BV.amax(dim=1).tolist()  # of all rows at once: an accelerator synchronizes
            for index, (b, largest) in enumerate(zip(changed, largest_B, strict=True)):
                if not largest > NEVER:
                    relaxed_V = self._relax(logits_BV[b].float(), rows[b], banned[b], largest)
                    if relaxed_V is None:
                        tokens[b] = NO_TOKEN
                        continue
                    processed_BV[index] = relaxed_V
                left[index] = rows[b]
            tokens |= {changed[index]: token for index, token in self._choose(processed_BV, left).items()}
        return [tokens[b] for b in range(len(rows))]

    def process(self, logits_V: torch.Tensor, row: SampledRow) -> torch.Tensor:
        """Logits of a row after its logits processors and its mask, float32: all -inf if every token is forbidden."""
        if not row.sampling.processors and not row.mask:
            return logits_V
        (banned_V,) = self._banned([row], logits_V)
        processed_V = self._apply(logits_V, row, banned_V)
        if (largest := float(processed_V.max())) > NEVER:
            return processed_V
        relaxed_V = self._relax(logits_V, row, banned_V, largest)
        return torch.full_like(logits_V, NEVER) if relaxed_V is None else relaxed_V

    def _banned(self, rows: Sequence[SampledRow], logits: torch.Tensor) -> list[Banned]:
        """Banned tokens of each row on the device of ``logits``, to which those of all rows are copied at once."""
        banned = [~read_allowed(row.mask, logits.shape[-1]) for row in rows if row.mask]
        if not banned:
            return [None] * len(rows)
        banned_BV = torch.empty(len(banned), logits.shape[-1], dtype=torch.bool, device=logits.device)
        self._copies.upload(torch.stack(banned), banned_BV)
        uploaded = iter(banned_BV)
        return [next(uploaded) if row.mask else None for row in rows]

    def _relax(self, logits_V: torch.Tensor, row: SampledRow, banned_V: Banned, largest: float) -> torch.Tensor | None:
        """Process a row again in which no token is left, with tokens allowed that the model itself gives -inf. Returns its logits;
        None if its logits processors and mask together forbid every token.

        No constraint is dropped, with one exception: ``min_tokens`` yields to a mask, as a complete structured output must be able to end.

        Args:
            largest: the largest of the processed logits: -inf, or NaN.
        """
        assert not math.isnan(largest) or logits_V.isnan().any(), (
            f"the logits processors {', '.join(name for name, _ in row.sampling.processors)} make logits NaN"
        )
        logits_V = logits_V.clamp(min=UNLIKELY)
        for omitted in ("", MIN_TOKENS)[: 1 + bool(row.mask)]:
            processed_V = self._apply(logits_V, row, banned_V, omitted)
            if (processed_V != NEVER).any():  # NaN counts as allowed
                return processed_V
        return None

    def _apply(self, logits_V: torch.Tensor, row: SampledRow, banned_V: Banned, omitted: str = "") -> torch.Tensor:
        """Copy of ``logits_V`` after each of the row's processors but ``omitted``.

        The row's mask is applied before them, so that a processor that keeps the largest logits keeps allowed tokens,
        and after them, so that none restores a forbidden token.
        """
        processed_V = logits_V.clone()
        if banned_V is not None:
            processed_V.masked_fill_(banned_V, NEVER)
        for name, value in row.sampling.processors:
            if name != omitted:
                self._processors[name](processed_V, value, row)
        if banned_V is not None and row.sampling.processors:
            processed_V.masked_fill_(banned_V, NEVER)
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


def read_allowed(mask: bytes, vocab_size: int) -> torch.Tensor:
    """Decode a mask of ``BatchEntry`` into allowed tokens: bool (V)."""
    bits_V = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(bits_V).view(torch.bool)


def measure(
    logprobs_BV: torch.Tensor, token_ids: list[int], tops: list[int], with_ranks: bool = False, *, copies: HostCopies
) -> list[TokenLogprobs]:
    """Log-probability of each row's token, with the ``tops[b]`` likeliest tokens of row ``b``.

    Args:
        with_ranks: whether to compute the rank of each token.
    """
    places = (token_id % logprobs_BV.shape[1] for token_id in token_ids)  # any valid index in place of ``NO_TOKEN``
    logprobs_B1 = logprobs_BV.gather(1, int64_tensor(places, logprobs_BV.device).unsqueeze(1))
    parts = [logprobs_B1, *logprobs_BV.topk(max(tops))]
    if with_ranks:
        parts.append((logprobs_BV > logprobs_B1).sum(dim=1, keepdim=True) + 1)
    logprobs_B, top_BN, ids_BN, *ranks_B = (part.tolist() for part in copies.download(parts))
    ranks_B = ranks_B[0] if with_ranks else [[0]] * len(token_ids)
    return [
        TokenLogprobs(token_id, logprob, dict(zip(ids_N[:top], top_N[:top], strict=True)), rank)
        for token_id, (logprob,), (rank,), ids_N, top_N, top in zip(
            token_ids, logprobs_B, ranks_B, ids_BN, top_BN, tops, strict=True
        )
    ]
