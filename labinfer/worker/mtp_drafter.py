"""MTPDrafter: drafts tokens with the model's MTP layer, after those that a step has sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import nn

from labinfer.base.plan import BatchPlan, count_accepted
from labinfer.functions.attention_batch import AttentionBatch, int64_tensor
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.worker.kv_cache import KVCacheManager
from labinfer.worker.logits_processors.processor import SampledRow
from labinfer.worker.model_runner import ModelRunner
from labinfer.worker.sampler import Sampler
from labinfer.worker.sequence_state import SequenceState


@dataclass(eq=False, kw_only=True)
class MTPDraft:
    """A draft that the MTP layer is making for one sequence."""

    row: int
    """Row of the last valid token: drafted tokens after it were rejected. The draft follows the token sampled at ``row``."""
    context_len: int
    """Number of tokens in the KV cache up to ``row``, included."""
    count: int
    """Number of tokens to draft."""
    token_ids: list[int]
    """Tokens of the sequence, with the sampled token and the draft so far."""
    state: SequenceState
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens in the MTP layer's KV cache once the layer has run the next token."""
        return self.context_len + len(self.tokens)


class MTPDrafter:
    """Drafts tokens with the MTP layer, on the last stage. In each step it runs on every row of the batch, to fill its KV cache, then on its drafts.

    The layer's input is a row's hidden state and the next token. If the next token is unknown (as in a pooled prompt), or wrong
    (in a cached block that another token followed when it was computed), fewer drafted tokens are accepted; outputs stay the same.

    Args:
        model: the stage.
        cache: KV cache of the stage; its last layer is the MTP layer.
        sampler: samples drafted tokens with the sampling parameters of their sequences.
    """

    def __init__(self, model: nn.Module, cache: KVCacheManager, sampler: Sampler, device: torch.device):
        self._model, self._cache, self._sampler, self._device = model, cache, sampler, device

    def draft(
        self,
        plan: BatchPlan,
        batch: ModelInputBatch,
        hidden_TD: torch.Tensor,
        sequences: Mapping[int, SequenceState],
        token_ids: list[int] | None,
    ) -> list[tuple[int, ...]]:
        """Draft up to ``BatchEntry.num_drafts`` tokens after those that a step sampled; see ``StepDrafter``."""
        next_tokens, drafts = self._read(plan, batch, sequences, self._model.share(token_ids, plan.num_samples))
        asked = sorted(drafts.values(), key=lambda draft: -draft.count)
        rows = OutputRows(self._tensor([draft.row for draft in asked]), self._attention(asked))
        batch = replace(batch, token_ids_T=self._tensor(next_tokens))
        hidden_RD = self._model.draft(batch, self._model.final_norm(hidden_TD), self._cache.layers[-1], rows)
        while asked:
            self._choose(asked, hidden_RD)
            asked = [
                draft for draft in asked if len(draft.tokens) < draft.count
            ]  # a prefix of ``asked``, whose longest drafts come first
            if asked:
                hidden_RD = self._run(asked, hidden_RD[: len(asked)])
        return [tuple(drafts[index].tokens) if index in drafts else () for index in range(len(plan.entries))]

    def _read(
        self,
        plan: BatchPlan,
        batch: ModelInputBatch,
        sequences: Mapping[int, SequenceState],
        token_ids: list[int],
    ) -> tuple[list[int], dict[int, MTPDraft]]:
        """Next token of each row, and the requested drafts by entry."""
        samples, next_tokens, drafts = iter(token_ids), [], {}
        for index, entry in enumerate(plan.entries):
            state = sequences[entry.seq_id]
            sampled = [max(0, token) for token in islice(samples, entry.num_samples)]  # ``NO_TOKEN`` has no embedding
            first = entry.begin + entry.num_tokens - entry.num_samples
            behind = state.token_ids[entry.begin + 1 : first + 1] + sampled
            next_tokens += behind + [0] * (entry.num_tokens - len(behind))
            if entry.num_drafts:
                num_wrong = entry.num_samples - 1 - count_accepted(state.token_ids[first + 1 :], sampled)
                end = entry.begin + entry.num_tokens - num_wrong
                drafts[index] = MTPDraft(
                    row=batch.attention.row_ptr[index + 1] - 1 - num_wrong,
                    context_len=batch.attention.context_lens[index] - num_wrong,
                    count=entry.num_drafts,
                    token_ids=[*state.token_ids[:end], sampled[-1 - num_wrong]],
                    state=state,
                )
        return next_tokens, drafts

    def _choose(self, drafts: Sequence[MTPDraft], hidden_RD: torch.Tensor) -> None:
        """Sample the next token of each draft, and append it."""
        logits_RV, tokens = self._model.head_logits(hidden_RD), None
        if logits_RV is not None:
            tokens = self._sampler(
                logits_RV, [SampledRow(draft.state.sampling, draft.token_ids, b"") for draft in drafts]
            )
        for draft, token in zip(drafts, self._model.share(tokens, len(drafts)), strict=True):
            token = max(0, token)  # in place of ``NO_TOKEN``
            draft.tokens.append(token)
            draft.token_ids.append(token)

    def _run(self, drafts: Sequence[MTPDraft], hidden_RD: torch.Tensor) -> torch.Tensor:
        """Run the MTP layer on the last token of each draft and the layer's previous output: (R, D) → (R, D), a row per draft."""
        positions = [draft.length - 1 for draft in drafts]
        slots = [
            slot
            for draft in drafts
            for slot in self._cache.slots(draft.state.block_table, draft.length - 1, draft.length)
        ]
        attention = self._attention(drafts)
        self._model.cover_positions(max(positions) + 1)
        rows_R = self._tensor(list(range(len(drafts))))
        batch = ModelInputBatch(
            token_ids_T=self._tensor([draft.tokens[-1] for draft in drafts]),
            positions_T=self._tensor(positions),
            attention=attention,
            slots_T=self._tensor(slots),
            sample_rows_B=rows_R,
            prompt_rows=[],
            pooled=[],
        )
        return self._model.draft(batch, hidden_RD, self._cache.layers[-1], OutputRows(rows_R, attention))

    def _attention(self, drafts: Sequence[MTPDraft]) -> AttentionBatch:
        """Attention batch with one row for each draft."""
        lens = [draft.length for draft in drafts]
        tables = [draft.state.block_table[: self._cache.blocks_for(draft.length)] for draft in drafts]
        for draft, table in zip(drafts, tables, strict=True):
            assert len(table) == self._cache.blocks_for(draft.length), f"a draft of {draft.count} tokens has no blocks"
        return AttentionBatch.build(list(range(len(drafts) + 1)), lens, tables, self._device)

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return int64_tensor(numbers, self._device)


def attach_mtp_drafter(runner: ModelRunner, device: torch.device) -> None:
    """Attach an ``MTPDrafter`` to a runner if its stage has an MTP layer."""
    if getattr(model := runner.model, "mtp", None) is not None:
        runner.drafter = MTPDrafter(model, runner.cache, runner.sampler, device)
