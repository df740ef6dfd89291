"""ModelRunner: runs a rank's share of the model on a plan: sequence states, input tensors, sampling on the last stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import accumulate, chain, islice, repeat
from typing import Literal, Protocol

import torch
from torch import nn

from labinfer.base.plan import BatchPlan, BatchResult, EntryResult, TokenLogprobs
from labinfer.base.registry import REGISTRY
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.functions import Functions
from labinfer.models.layers.input_batch import (
    LongPrompts,
    ModelInputBatch,
    OutputRows,
    PooledRows,
    PromptRow,
    WindowedSlots,
)
from labinfer.worker.host_copies import HostCopies
from labinfer.worker.index_buffer import IndexBuffer
from labinfer.worker.kv_cache import KVCacheManager
from labinfer.worker.logits_processors.processor import SampledRow
from labinfer.worker.sampler import Sampler, measure
from labinfer.worker.sequence_state import SequenceState

LOGITS_ROWS = 64
"""Prompt rows whose logits are computed at a time: a row of a large vocabulary takes more than half a megabyte."""
FEW_ROWS = 17
"""Rows of a lone sequence up to which the last stage outputs all rows, so that steps with drafted tokens can be captured."""

StepPart = Callable[[ModelInputBatch, torch.Tensor | None], torch.Tensor]
"""Part of a step (the layers or the LM head), called with a batch and hidden states."""
Around = Callable[[StepPart, Literal["layers", "head"]], StepPart]
"""Wraps a part of the step, such as to capture it as a graph. Called once for each part, by the runner's constructor."""


class StepDrafter(Protocol):
    """Drafts tokens after those that a step samples, on all ranks of the last stage; see ``MTPDrafter``."""

    def draft(
        self,
        plan: BatchPlan,
        batch: ModelInputBatch,
        hidden_TD: torch.Tensor,
        sequences: Mapping[int, SequenceState],
        token_ids: list[int] | None,
    ) -> list[tuple[int, ...]]:
        """Drafted tokens of each entry, ``BatchEntry.num_drafts`` of them.

        Args:
            hidden_TD: hidden states of all rows after the last layer.
            token_ids: sampled tokens; None on all ranks but the stage's first.
        """


def plain_steps(part: StepPart, name: str) -> StepPart:
    """``Around`` that wraps nothing: return ``part`` unchanged."""
    return part


class ModelRunner:
    """Runs one rank's share of the model, and keeps its copies of the running sequences.

    Args:
        model: this rank's share, loaded.
        cache: this rank's KV cache.
        dtype: dtype of the activations inside this stage.
        functions: implementations of ``argmax`` and ``sample``.
        around: wraps the layers and the head, for example to capture their calls.
        copies: copies between the device and the host; plain ``HostCopies`` by default.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCacheManager,
        *,
        device: torch.device,
        dtype: torch.dtype,
        functions: Functions,
        around: Around = plain_steps,
        copies: HostCopies | None = None,
    ):
        self.model, self.cache, self._around = model, cache, around
        self._layers = around(lambda batch, hidden: model(batch, hidden, cache.layers), "layers")
        self._head = around(partial(sampled_logits, model), "head")
        self._dtype, self._copies = dtype, copies or HostCopies()
        self._indices = IndexBuffer(device, self._copies)
        # Block tables grow and shift what follows them in a buffer, so window tables have a buffer of their own.
        self._window_indices = IndexBuffer(device, self._copies)
        self._sequences: dict[int, SequenceState] = {}
        self.sampler = Sampler(REGISTRY.parts("logits_processor"), functions, self._copies)
        self.drafter: StepDrafter | None = None
        """Drafts tokens after each step (MTP layer); None on ranks that draft none."""

    def with_layers(self, indices: Sequence[int]) -> ModelRunner:
        """Return a runner of some layers of this runner, which shares its weights, cache and sequences; for measurements.

        Args:
            indices: indices of the layers within the stage, ascending; at least one.
        """
        part, model = copy(self), self.model.with_layers(indices)
        caches = self.cache.layers
        part._layers = self._around(lambda batch, hidden: model(batch, hidden, caches), "layers")
        return part

    def prepare(self, plan: BatchPlan, all_rows: bool = False) -> ModelInputBatch:
        """Apply a plan's changes and build the inputs of its step, which are valid until the next call.

        Args:
            all_rows: whether the last stage returns all hidden states, not only those that the plan asks for.
        """
        self.forget(plan.finished)
        for start in plan.starts:
            self._sequences[start.seq_id] = SequenceState(
                token_ids=list(start.token_ids), sampling=start.sampling, state_slot=start.state_slot
            )
        token_ids, positions, slots, row_ptr = [], [], [], [0]
        context_lens, block_tables, window_tables, sample_rows = [], [], [], []
        cache, size, window_slots = self.cache, self.cache.block_size, []
        prompt_rows: list[PromptRow] = []
        pooled: list[PooledRows] = []
        dynamic_from, long_prompts = self.model.dynamic_rope_from, LongPrompts([], [])
        for index, entry in enumerate(plan.entries):
            state = self._sequences[entry.seq_id]
            begin, end = entry.begin, entry.begin + entry.num_tokens
            if entry.new_tokens:
                state.token_ids[end - len(entry.new_tokens) :] = entry.new_tokens
            state.block_table[entry.first_block :] = entry.new_blocks
            assert end <= len(state.token_ids), (
                f"sequence {entry.seq_id} has {len(state.token_ids)} tokens, but step {plan.step_id} needs {end}"
            )
            if state.sampling.prompt_logprobs is not None:
                for position in range(begin, min(end, state.sampling.num_prompt_tokens - 1)):
                    row = row_ptr[-1] + position - begin
                    next_token = state.token_ids[position + 1]
                    prompt_rows.append(PromptRow(row, index, next_token, state.sampling.prompt_logprobs))
            token_ids += state.token_ids[begin:end]
            context_len = entry.position + entry.num_tokens
            positions += range(entry.position, context_len)
            if dynamic_from and begin < (length := state.sampling.num_prompt_tokens) > dynamic_from:
                first, count = self.model.rotary_length + len(long_prompts.positions), min(end, length) - begin
                positions[row_ptr[-1] : row_ptr[-1] + count] = range(first, first + count)
                long_prompts.positions.extend(range(begin, begin + count))
                long_prompts.lengths.extend([length] * count)
            # Inlined ``KVCacheManager.slots``: calls would take a measurable part of this loop's time.
            slots += [state.block_table[p // size] * size + p % size for p in range(entry.position, context_len)]
            row_ptr.append(row_ptr[-1] + entry.num_tokens)
            context_lens.append(context_len)
            block_tables.append(state.block_table[: -(-context_len // size)])
            if cache.has_window_blocks:
                table = state.window_table
                table[entry.first_window_block :] = entry.new_window_blocks
                window_slots += [table[p // size] * size + p % size for p in range(entry.position, context_len)]
                window_tables.append(table[: -(-context_len // size)])
            sample_rows += range(row_ptr[-1] - entry.num_samples, row_ptr[-1])
            if state.sampling.pooling == "mean":
                pooled.append(PooledRows(row_ptr[-2], row_ptr[-1], index))
            elif state.sampling.pooling == "cls" and (begin == 0 or end == state.sampling.num_prompt_tokens):
                pooled.append(PooledRows(row_ptr[-2], row_ptr[-2] + (begin == 0), index))
            elif state.sampling.pooling == "last" and end == state.sampling.num_prompt_tokens:
                pooled.append(PooledRows(row_ptr[-1] - 1, row_ptr[-1], index))
        if not self.model.is_causal:
            # Bidirectional attention: each token becomes a sequence of one row with the length and KV blocks of its whole prompt.
            repeats = [entry.num_tokens for entry in plan.entries]
            row_ptr = list(range(len(token_ids) + 1))
            context_lens = list(chain.from_iterable(map(repeat, context_lens, repeats)))
            block_tables = list(chain.from_iterable(map(repeat, block_tables, repeats)))
        table_ptr = list(accumulate(map(len, block_tables), initial=0))
        has_states = cache.has_states
        tensors = self._indices.fill(
            token_ids_T=[token_ids],
            positions_T=[positions],
            slots_T=[slots],
            sample_rows_B=[sample_rows],
            state_slots_B=[[self._sequences[entry.seq_id].state_slot for entry in plan.entries]] if has_states else [],
            row_ptr_B=[row_ptr],
            context_lens_B=[context_lens],
            table_ptr_B=[table_ptr],
            tables_N=block_tables,  # last: longer contexts move no other tensor
        )
        output_rows = windowed = None
        attention = AttentionBatch(
            row_ptr=row_ptr,
            context_lens=context_lens,
            table_ptr=table_ptr,
            tables_N=tensors["tables_N"],
            row_ptr_B=tensors["row_ptr_B"],
            context_lens_B=tensors["context_lens_B"],
            table_ptr_B=tensors["table_ptr_B"],
            state_slots_B=tensors["state_slots_B"] if has_states else None,
        )
        if cache.has_window_blocks:
            in_windows = self._window_indices.fill(slots_T=[window_slots], tables_N=window_tables)
            windowed = WindowedSlots(in_windows["slots_T"], attention.with_tables(in_windows["tables_N"]))
        is_chunk = len(plan.entries) == 1 and len(token_ids) <= FEW_ROWS
        all_rows |= self.drafter is not None  # the MTP layer caches keys and values of all tokens
        if not (all_rows or prompt_rows or pooled or is_chunk) and len(sample_rows) < len(token_ids) > len(
            plan.entries
        ):
            counts = [entry.num_samples for entry in plan.entries]
            output_rows = self._output_rows(tensors["sample_rows_B"], counts, context_lens, block_tables, window_tables)
        return ModelInputBatch(
            token_ids_T=tensors["token_ids_T"],
            positions_T=tensors["positions_T"],
            attention=attention,
            slots_T=tensors["slots_T"],
            sample_rows_B=tensors["sample_rows_B"],
            prompt_rows=prompt_rows,
            pooled=pooled,
            long_prompts=long_prompts if long_prompts.positions else None,
            output_rows=output_rows,
            windowed=windowed,
        )

    def _output_rows(
        self,
        rows_R: torch.Tensor,
        counts: list[int],
        context_lens: list[int],
        block_tables: list[list[int]],
        window_tables: list[list[int]],
    ) -> OutputRows:
        """Build the attention batch of only the rows that need logits, ``counts[i]`` rows of entry i. The last layer computes
        no others.

        Not called in steps of one token per sequence, in which all rows need logits, so such steps can be captured as a graph.
        """
        sampled = [index for index, count in enumerate(counts) if count]
        row_ptr = list(accumulate((counts[index] for index in sampled), initial=0))
        lens = [context_lens[index] for index in sampled]
        attention, windowed = (
            AttentionBatch.build(row_ptr, lens, [tables[index] for index in sampled], rows_R.device) if tables else None
            for tables in (block_tables, window_tables)
        )
        return OutputRows(rows_R, attention, windowed)

    @torch.inference_mode()
    def run(self, plan: BatchPlan, batch: ModelInputBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """Carry out the plan's moves in the KV cache, then run this stage's layers.

        Input is (T, D), or None on the first stage. Output is (T, D), or (R, D) of ``output_rows`` on the last stage.
        It may be valid only until the next step.
        """
        self.cache.move(plan.moves)
        if hidden_TD is not None:
            hidden_TD = hidden_TD.to(self._dtype)
        self.model.cover_positions(max(batch.attention.context_lens, default=0))
        if batch.long_prompts is not None:
            self.model.place_prompts(batch.long_prompts.positions, batch.long_prompts.lengths)
        return self._layers(batch, hidden_TD)

    @torch.inference_mode()
    def sample(self, plan: BatchPlan, batch: ModelInputBatch, hidden_TD: torch.Tensor) -> BatchResult | None:
        """Sample, compute log-probabilities and pool for the plan's entries, on the last stage.

        Returns the step's result. If a token is sampled, ranks other than the stage's first have no logits and return None.
        """
        vectors = self._pool(plan, batch, hidden_TD)
        prompt_logprobs = self._measure_prompts(plan, batch, hidden_TD)
        num_entries = len(plan.entries)
        token_ids, logprobs, drafts = [], [()] * num_entries, [()] * num_entries
        if len(batch.sample_rows_B):
            logits_BV = self._head(batch, hidden_TD)
            token_ids = None
            if logits_BV is not None:
                rows = self._sampled_rows(plan)
                token_ids = self.sampler(logits_BV, rows)
                logprobs = self._measure_samples(plan, logits_BV, rows, token_ids)
        if self.drafter is not None:
            drafts = self.drafter.draft(plan, batch, hidden_TD, self._sequences, token_ids)
        if token_ids is None:
            return None
        counts, tokens = [entry.num_samples for entry in plan.entries], iter(token_ids)
        only_decodes = counts.count(1) == len(counts)  # many times faster than slices
        samples = zip(tokens, strict=False) if only_decodes else (tuple(islice(tokens, count)) for count in counts)
        return BatchResult(plan.step_id, list(map(EntryResult, samples, logprobs, prompt_logprobs, vectors, drafts)))

    def _sampled_rows(self, plan: BatchPlan) -> list[SampledRow]:
        """One row for each token to sample of the plan, with the tokens before it."""
        rows = []
        for entry in plan.entries:
            if entry.num_samples == 0:
                continue
            state = self._sequences[entry.seq_id]
            end = entry.begin + entry.num_tokens
            assert end == len(state.token_ids), f"sequence {entry.seq_id} is sampled before its last token"
            masks = entry.masks or (b"",) * entry.num_samples
            if entry.num_samples > 1:
                first = end + 1 - entry.num_samples
                prefixes = zip(range(first, end), masks, strict=False)
                rows += [SampledRow(state.sampling, state.token_ids[:length], mask) for length, mask in prefixes]
            rows.append(SampledRow(state.sampling, state.token_ids, masks[-1]))
        return rows

    def _measure_samples(
        self, plan: BatchPlan, logits_BV: torch.Tensor, rows: list[SampledRow], token_ids: list[int]
    ) -> list[tuple[TokenLogprobs, ...]]:
        """Log-probabilities of the sampled tokens by entry, if requested."""
        measured_rows = [b for b, row in enumerate(rows) if row.sampling.logprobs is not None]
        if not measured_rows:
            return [()] * len(plan.entries)
        if len(measured_rows) < len(rows):
            logits_BV = torch.stack([logits_BV[b] for b in measured_rows])  # stacks views: no index tensor
        logprobs_BV = logits_BV.float().log_softmax(dim=-1)
        self.sampler.process_beams(logprobs_BV, [rows[b] for b in measured_rows])
        tops = [rows[b].sampling.logprobs for b in measured_rows]
        measured = iter(measure(logprobs_BV, [token_ids[b] for b in measured_rows], tops, copies=self._copies))
        asking = [self._sequences[entry.seq_id].sampling.logprobs is not None for entry in plan.entries]
        return [
            tuple(islice(measured, entry.num_samples if asks else 0))
            for entry, asks in zip(plan.entries, asking, strict=True)
        ]

    def _measure_prompts(
        self, plan: BatchPlan, batch: ModelInputBatch, hidden_TD: torch.Tensor
    ) -> list[tuple[TokenLogprobs, ...]]:
        """Log-probabilities of prompt tokens by entry, if requested: of the token after each row. Empty on ranks without logits."""
        if not batch.prompt_rows:
            return [()] * len(plan.entries)
        measured: list[list[TokenLogprobs]] = [[] for _ in plan.entries]
        for start in range(0, len(batch.prompt_rows), LOGITS_ROWS):
            rows = batch.prompt_rows[start : start + LOGITS_ROWS]
            logits_BV = self.model.logits(hidden_TD[[row.row for row in rows]])
            if logits_BV is not None:
                logprobs_BV = logits_BV.float().log_softmax(dim=-1)
                next_tokens, tops = [row.next_token for row in rows], [row.top for row in rows]
                parts = measure(logprobs_BV, next_tokens, tops, with_ranks=True, copies=self._copies)
                for row, part in zip(rows, parts, strict=True):
                    measured[row.entry].append(part)
        return list(map(tuple, measured))

    def _pool(self, plan: BatchPlan, batch: ModelInputBatch, hidden_TD: torch.Tensor) -> list[tuple[float, ...]]:
        """Add final hidden states to the pooling sums. Returns the vector of each entry whose prompt ends here.

        A mean is taken over all tokens of the prompt, which may run in several steps. The mean of one pooled token is
        its hidden state.
        """
        vectors: list[tuple[float, ...]] = [()] * len(plan.entries)
        if not batch.pooled:
            return vectors
        rows = [row for part in batch.pooled for row in range(part.begin, part.end)]
        normed_TD = self.model.final_norm(hidden_TD[rows]) if rows else hidden_TD[:0]
        means: dict[int, torch.Tensor] = {}
        parts_TD = normed_TD.split([part.end - part.begin for part in batch.pooled])
        for part, part_TD in zip(batch.pooled, parts_TD, strict=True):
            entry = plan.entries[part.entry]
            state = self._sequences[entry.seq_id]
            sum_D = part_TD.sum(dim=0, dtype=torch.float32)
            state.hidden_sum_D = sum_D if state.hidden_sum_D is None else state.hidden_sum_D + sum_D
            state.num_pooled += len(part_TD)
            if entry.begin + entry.num_tokens == state.sampling.num_prompt_tokens:
                means[part.entry] = state.hidden_sum_D / state.num_pooled
        if means:
            for index, vector in zip(means, self.model.pooled(torch.stack([*means.values()])).tolist(), strict=True):
                vectors[index] = tuple(vector)
        return vectors

    def forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            del self._sequences[seq_id]


def sampled_logits(model: nn.Module, batch: ModelInputBatch, hidden_TD: torch.Tensor) -> torch.Tensor | None:
    """Logits of the sampled rows, (B, V); None except on the stage's first rank."""
    samples_all = batch.output_rows is not None or len(batch.sample_rows_B) == len(hidden_TD)  # each row once, in order
    rows_BD = hidden_TD if samples_all else hidden_TD[batch.sample_rows_B]
    return model.logits(rows_BD)
