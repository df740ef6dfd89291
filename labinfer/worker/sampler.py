"""Sampler: from logits to token ids, by logits processors, masks and greedy or random choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from labinfer.base.draw_params import DrawParams
from labinfer.base.plan import NO_TOKEN, TokenLogprobs
from labinfer.base.sampling_params import GREEDY_BELOW
from labinfer.functions.draw import Draw
from labinfer.functions.functions import Functions
from labinfer.worker.host_copies import HostCopies
from labinfer.worker.logits_processors.processor import LogitsProcessor, SampledRow

NEVER = float("-inf")
UNLIKELY = -1e30
"""Logit that replaces a -inf from the LM head, so that such a token can be sampled if nothing else is allowed."""
MIN_TOKENS = "min_tokens"
"""Logits processor that forbids stop tokens at the beginning of an answer."""
BANNED = ""
RowTensors = dict[str, torch.Tensor]
"""Name of a row's logits processor → its ``numbers``; ``BANNED`` → tokens outside the row's mask, bool (V)."""
LARGEST = DrawParams(temperature=1.0, top_k=1)
"""Parameters that draw the token ``argmax`` gives."""


class Sampler:
    """Samples the next token of every row.

    Args:
        processors: logits processors that rows may name.
        functions: implementations of ``argmax`` and ``sample``.
        copies: copies between the device and the host.
    """

    def __init__(self, processors: Mapping[str, LogitsProcessor], functions: Functions, copies: HostCopies):
        self._processors, self._copies = processors, copies
        self._numbers = {name: call.numbers for name, call in processors.items() if hasattr(call, "numbers")}
        self._argmax, self._sample = functions.argmax, functions.sample

    def __call__(self, logits_BV: torch.Tensor, rows: list[SampledRow]) -> list[int]:
        """Sample a token id for each row: ``NO_TOKEN`` if its processors and its mask together forbid every token.

        Args:
            logits_BV: unscaled, any float type.
            rows: sampling parameters, prefix and mask of each row.
        """
        # Beams use log-probabilities only, which ``process_beams`` processes: their logits stay as they are.
        changed = {b: row for b, row in enumerate(rows) if row.is_processed and not row.sampling.after_processors}
        together = changed if logits_BV.is_cpu or not changed else dict(enumerate(rows))  # for one copy to the host
        tokens = self._choose(logits_BV, {b: row for b, row in enumerate(rows) if b not in together})
        if changed:
            processed_BV, tensors = self._process(logits_BV, together, changed)
            chosen = self._choose(processed_BV, dict(enumerate(together.values())))
            tokens |= {b: chosen[index] for index, b in enumerate(together)}
            for b in [b for b in together if tokens[b] == logits_BV.shape[1]]:
                logits_V = self._relax(logits_BV[b].float(), rows[b], tensors[b]) if b in changed else logits_BV[b]
                tokens[b] = NO_TOKEN if logits_V is None else self._choose(logits_V[None], {0: rows[b]})[0]
        return [tokens[b] for b in range(len(rows))]

    def process_beams(self, logprobs_BV: torch.Tensor, rows: Sequence[SampledRow]) -> None:
        """Apply the logits processors and masks of beams to their log-probabilities, float32; all are -inf if every token is forbidden."""
        beams = {b: row for b, row in enumerate(rows) if row.is_processed and row.sampling.after_processors}
        if beams:
            processed_BV, tensors = self._process(logprobs_BV, beams, beams)
            for b, processed_V, last in zip(beams, processed_BV[:, :-1], processed_BV[:, -1].tolist(), strict=True):
                left_V = self._relax(logprobs_BV[b], rows[b], tensors[b]) if last > NEVER else processed_V
                logprobs_BV[b] = NEVER if left_V is None else left_V

    def _process(
        self, logits_BV: torch.Tensor, rows: Mapping[int, SampledRow], changed: Mapping[int, SampledRow]
    ) -> tuple[torch.Tensor, dict[int, RowTensors]]:
        """Logits of some rows, float32, after the logits processors and masks of the rows ``changed``; and ``RowTensors`` of these rows.

        One more column is infinity in a row without a possible token, so that this column is chosen, and else -inf.
        """
        tensors = self._upload(changed, logits_BV.shape[1])
        processed_BV = logits_BV.new_empty((len(rows), logits_BV.shape[1] + 1), dtype=torch.float32)
        processed_BV[:, -1] = NEVER
        for b, processed_V in zip(rows, processed_BV[:, :-1], strict=True):
            processed_V.copy_(logits_BV[b])
            if b in changed:
                self._apply(processed_V, rows[b], tensors[b])
        is_empty_B1 = ~(processed_BV.amax(dim=1, keepdim=True) > NEVER)  # True for NaN logits, too
        if not logits_BV.is_cpu or is_empty_B1.any():  # on an accelerator ``any`` would wait
            processed_BV.masked_fill_(is_empty_B1, NEVER)
            processed_BV[:, -1:].masked_fill_(is_empty_B1, -NEVER)
        return processed_BV, tensors

    def _upload(self, rows: Mapping[int, SampledRow], vocab_size: int) -> dict[int, RowTensors]:
        """``RowTensors`` of each row on the device, all by one copy."""
        on_host = {b: {} for b in rows}
        for b, row in rows.items():
            parameters = [each for each in row.sampling.processors if each[0] in self._numbers]
            on_host[b] |= {name: self._numbers[name](value, row) for name, value in parameters}
            if row.mask:
                bits = np.unpackbits(np.frombuffer(row.mask, np.uint8), count=vocab_size, bitorder="little")
                on_host[b][BANNED] = torch.from_numpy(bits == 0)
        uploaded = iter(self._copies.upload_all([part for parts in on_host.values() for part in parts.values()]))
        return {b: {name: next(uploaded) for name in parts} for b, parts in on_host.items()}

    def _relax(self, logits_V: torch.Tensor, row: SampledRow, tensors: RowTensors) -> torch.Tensor | None:
        """Process a row again in which no token is left, with tokens allowed that the model itself gives -inf. Returns its logits;
        None if its logits processors and mask together forbid every token.

        No constraint is dropped, with one exception: ``min_tokens`` yields to a mask, as a complete structured output must be able to end.
        """
        for omitted in ("", MIN_TOKENS)[: 1 + bool(row.mask)]:
            processed_V = logits_V.clamp(min=UNLIKELY)
            self._apply(processed_V, row, tensors, omitted)
            assert not processed_V.isnan().any() or logits_V.isnan().any(), (
                f"the logits processors {', '.join(name for name, _ in row.sampling.processors)} make logits NaN"
            )
            if (processed_V != NEVER).any():  # NaN counts as allowed
                return processed_V
        return None

    def _apply(self, logits_V: torch.Tensor, row: SampledRow, tensors: RowTensors, omitted: str = "") -> None:
        """Apply a row's mask, and each of its logits processors but ``omitted``, to its logits.

        The row's mask is applied before them, so that a processor that keeps the largest logits keeps allowed tokens,
        and after them, so that none restores a forbidden token.
        """
        if BANNED in tensors:
            logits_V.masked_fill_(tensors[BANNED], NEVER)
        for name, value in row.sampling.processors:
            if name != omitted:
                self._processors[name](logits_V, value, tensors.get(name, row))
        if BANNED in tensors and row.sampling.processors:
            logits_V.masked_fill_(tensors[BANNED], NEVER)

    def _choose(self, logits_BV: torch.Tensor, rows: Mapping[int, SampledRow]) -> dict[int, int]:
        """Choose the tokens of some rows of the logits: greedy, or sampled with a temperature."""
        drawn = {b: row for b, row in rows.items() if row.sampling.temperature >= GREEDY_BELOW}
        draws = [Draw(b, len(row.token_ids), row.sampling) for b, row in drawn.items()]
        if drawn and not logits_BV.is_cpu:  # one copy to the host for all rows
            draws += [Draw(b, 0, LARGEST) for b in rows if b not in drawn]
        ids = self._sample(logits_BV, draws) if draws else []
        tokens = {draw.row: token_id for draw, token_id in zip(draws, ids, strict=True)}
        if len(tokens) < len(rows):
            largest = self._argmax(logits_BV).tolist()
            tokens = {b: tokens.get(b, largest[b]) for b in rows}
        return tokens


def measure(
    logprobs_BV: torch.Tensor, token_ids: list[int], tops: list[int], with_ranks: bool = False, *, copies: HostCopies
) -> list[TokenLogprobs]:
    """Log-probability of each row's token, with the ``tops[b]`` likeliest tokens of row ``b``.

    Args:
        with_ranks: whether to compute the rank of each token.
    """
    # Views, as an index tensor would be a copy to an accelerator. ``NO_TOKEN`` gets the log-probability of the last token.
    logprobs_B1 = torch.stack([logprobs_BV[b, token_id] for b, token_id in enumerate(token_ids)]).unsqueeze(1)
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
