"""Paged attention by ``npu_fused_infer_attention_score``.

The operator takes context lengths as host lists, so a captured graph is given new lengths before each replay (``graph.py``). Its limits
are those of torch_npu-npu_fused_infer_attention_score.md in Ascend/op-plugin; other sizes and dtypes are passed to the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import ModuleType

import torch

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads
from labinfer.functions.graph import HostReadGuard, NotReplayable
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.npu.elementwise import HALF_DTYPES
from labinfer.functions.reference import attention

DECODE_ALIGNMENT, PROMPT_ALIGNMENT = 16, 128
"""Block sizes that the operator supports are multiples of 16 if every sequence has one new token, and of 128 otherwise."""
MAX_BLOCK = 512
HEAD_ALIGNMENT, MAX_HEAD_SIZE = 16, 512
MAX_HEADS, MAX_GROUP = 256, 64
MAX_ENTRY = 65535
"""Maximum number of elements of a token's keys (KV heads times head size) that the operator supports."""
MAX_CONTEXT = 262144
"""Maximum context length of a decode that the operator supports."""
MAX_ELEMENTS = 2**31 - 1
"""Maximum number of elements of a layer's keys that the operator supports."""
MASK_SIZE = 2048
"""Size of the causal mask, which the operator shifts to each sequence."""
RAGGED_HEAD_SIZE, MAX_RAGGED_SEQUENCES, MAX_RAGGED_TOKENS = 128, 4096, 1048576
"""Head size and limits of a call whose sequences have different numbers of new tokens (layout TND)."""
CAUSAL, BAND = 3, 4
"""Values of the operator's argument ``sparse_mode``: a causal mask, and one with a sliding window; both are aligned to the last key of a sequence."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive sequences of a batch with equal numbers of new tokens, which attend in one call.

    Args:
        begin, end: range of the sequences.
        count: new tokens of each sequence.
        window: sliding-window size in tokens; 0 for full attention.
        block: block size of the pool in tokens.
        pool_blocks: number of blocks of the pool.
    """

    begin: int
    end: int
    count: int
    window: int
    block: int
    pool_blocks: int

    def key_lengths(self, context_lens: Sequence[int]) -> list[int]:
        """Number of keys of each sequence from the first block that the operator reads."""
        own = context_lens[self.begin : self.end]
        return [_key_length(length, self.count, self.window, self.block) for length in own]


class NpuAttention:
    """Paged attention on one device; an implementation of ``PagedAttention``.

    Args:
        ops: module of the operators.
        device: device of the tensors.
    """

    def __init__(self, ops: ModuleType, device: torch.device):
        self._ops = ops
        self._mask = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)
        self.lengths: StepLengths | None = None
        """Context lengths of the step that is recorded or replayed; None in steps that are not captured."""

    def __call__(
        self, q_THP: torch.Tensor, cache: LayerCache, batch: AttentionBatch, heads: AttentionHeads
    ) -> torch.Tensor:
        if not q_THP.numel():
            return torch.empty_like(q_THP)
        if not _can_attend(q_THP, cache, heads):
            return attention.paged_attention(q_THP, cache, batch, heads)
        lengths = self._find_lengths(batch)
        counts = _new_tokens(q_THP, batch, len(lengths.context_lens))
        block = cache.block_size
        alignment = DECODE_ALIGNMENT if max(counts) == 1 else PROMPT_ALIGNMENT
        if block % alignment or max(lengths.context_lens) > MAX_CONTEXT:
            return attention.paged_attention(q_THP, cache, batch, heads)
        window = heads.window if heads.window < lengths.capacity(block) * block else 0
        runs = list(_split(lengths.context_lens, counts, window, block, cache.k.shape[0]))
        if lengths.is_recorded and len(runs) > 1:
            raise NotReplayable("sequences attend in several calls")
        q_THP = q_THP.contiguous()
        if len(runs) > 1 and not window:
            whole = replace(runs[0], end=len(counts), count=max(counts))
            if _is_ragged_case(q_THP, lengths.context_lens, whole):
                return self._attend_ragged(q_THP, cache, batch, heads, run=whole, counts=counts, lengths=lengths)
        rows = [0, *accumulate(run.count * (run.end - run.begin) for run in runs)]
        parts = [
            self._attend(q_THP[begin:end], cache, batch, heads, run=run, lengths=lengths)
            for run, (begin, end) in zip(runs, pairwise(rows), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _find_lengths(self, batch: AttentionBatch) -> StepLengths:
        """Context lengths of the batch; the lengths of the captured step if the batch has no lists."""
        if not isinstance(batch.context_lens, HostReadGuard):
            return StepLengths(batch.context_lens)
        if self.lengths is None:
            raise NotReplayable("context_lens is read in Python")
        return self.lengths

    def _attend(
        self,
        q_THP: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        heads: AttentionHeads,
        *,
        run: Run,
        lengths: StepLengths,
    ) -> torch.Tensor:
        """Attention of one run, (T, H, P), in the layout BSND."""
        table_BN, hidden_BS = _run_tables(batch, run, lengths)
        mask: dict[str, object] = {}
        if run.count > 1:
            mask = {"atten_mask": self._mask, "sparse_mode": CAUSAL}
            if run.window:
                mask |= {"sparse_mode": BAND, "pre_tokens": run.window - 1, "next_tokens": 0}
        elif run.window:
            mask = {"atten_mask": hidden_BS}
        q_BTHP = q_THP.view(run.end - run.begin, run.count, *q_THP.shape[1:])
        return self._call(
            q_BTHP,
            cache,
            heads,
            input_layout="BSND",
            block_table=table_BN,
            actual_seq_lengths_kv=lengths.note(run),
            **mask,
        ).view(q_THP.shape)

    def _attend_ragged(
        self,
        q_THP: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        heads: AttentionHeads,
        *,
        run: Run,
        counts: list[int],
        lengths: StepLengths,
    ) -> torch.Tensor:
        """Attention of sequences with different numbers of new tokens, (T, H, P), in the layout TND.

        Args:
            run: all sequences of the batch, each with the largest of ``counts``.
        """
        return self._call(
            q_THP,
            cache,
            heads,
            input_layout="TND",
            block_table=_run_tables(batch, run, lengths)[0],
            actual_seq_lengths=list(accumulate(counts)),
            actual_seq_lengths_kv=lengths.context_lens,
            atten_mask=self._mask,
            sparse_mode=CAUSAL,
        )

    def _call(self, q: torch.Tensor, cache: LayerCache, heads: AttentionHeads, **named) -> torch.Tensor:
        return self._ops.npu_fused_infer_attention_score(
            q,
            cache.k.flatten(2),
            cache.v.flatten(2),
            num_heads=q.shape[-2],
            num_key_value_heads=len(heads.head_ptr) - 1,
            scale=heads.scale,
            block_size=cache.block_size,
            **named,
        )[0]


class StepLengths:
    """Context lengths of a step, and the attention calls of its captured graph, whose lengths are updated before each replay.

    Args:
        context_lens: context length of each sequence.
        is_recorded: whether the calls become part of a graph. Their block tables then have room for longer contexts.
    """

    def __init__(self, context_lens: Sequence[int], *, is_recorded: bool = False):
        self.context_lens, self.is_recorded = list(context_lens), is_recorded
        self.runs: list[Run] = []
        """Run of each recorded call, in the order of the calls."""

    def capacity(self, block: int) -> int:
        """Number of blocks for which a sequence's block table has room, with ``block`` tokens per block."""
        blocks = -(-max(self.context_lens) // block)
        return 1 << blocks.bit_length() if self.is_recorded else blocks

    def note(self, run: Run) -> list[int]:
        """Key lengths of the call for ``run``. Appends ``run`` to ``runs`` if the step is recorded."""
        if self.is_recorded:
            self.runs.append(run)
        return run.key_lengths(self.context_lens)

    def fits(self, context_lens: Sequence[int]) -> bool:
        """Whether the recorded calls can be repeated with other context lengths."""
        for run in set(self.runs):
            most = max(context_lens)
            blocks = sum(-(-length // run.block) for length in run.key_lengths(context_lens))
            if most > min(self.capacity(run.block) * run.block, MAX_CONTEXT) or blocks > run.pool_blocks:
                return False
        return True


def _can_attend(q_THP: torch.Tensor, cache: LayerCache, heads: AttentionHeads) -> bool:
    """Whether the operator supports the dtypes, heads and pools of these arguments."""
    num_heads, size = q_THP.shape[1:]
    groups = set(heads.head_ptr.diff().tolist())
    return (
        q_THP.dtype in HALF_DTYPES
        and not cache.is_tiled
        and all(pool.dtype == q_THP.dtype and pool.is_contiguous() for pool in (cache.k, cache.v))
        and cache.k.numel() <= MAX_ELEMENTS
        and cache.k.shape[2] * size <= MAX_ENTRY
        and cache.block_size <= MAX_BLOCK
        and size % HEAD_ALIGNMENT == 0
        and size <= MAX_HEAD_SIZE
        and num_heads <= MAX_HEADS
        and len(groups) == 1
        and max(groups) <= MAX_GROUP
        and heads.sinks_H is None
        and not heads.cap
    )


def _is_ragged_case(q_THP: torch.Tensor, context_lens: Sequence[int], run: Run) -> bool:
    """Whether one call in the layout TND can serve the batch, whose sequences are all in ``run``."""
    return (
        q_THP.shape[2] == RAGGED_HEAD_SIZE
        and len(q_THP) <= MAX_RAGGED_TOKENS
        and len(context_lens) <= MAX_RAGGED_SEQUENCES
        and run.block % PROMPT_ALIGNMENT == 0
        and sum(-(-length // run.block) for length in context_lens) <= run.pool_blocks
    )


def _new_tokens(q_THP: torch.Tensor, batch: AttentionBatch, num_sequences: int) -> list[int]:
    """Number of new tokens of each sequence; reads the batch's list only if the number does not follow from the shapes."""
    if batch.has_single_rows(q_THP) or num_sequences == 1:
        return [len(q_THP) // num_sequences] * num_sequences
    return [end - begin for begin, end in pairwise(batch.row_ptr)]


def _key_length(context_len: int, count: int, window: int, block: int) -> int:
    """Number of keys of a sequence, without the blocks that are before the windows of all ``count`` new tokens."""
    first = max(0, context_len - count - window + 1) if window else 0
    return context_len - first // block * block


def _split(
    context_lens: Sequence[int], counts: Sequence[int], window: int, block: int, pool_blocks: int
) -> Iterator[Run]:
    """Divide the sequences into runs with equal ``counts``. As the operator refuses a call whose sequences have more blocks in total than
    the pool (shared blocks count several times), more runs may be needed."""
    pool = {"window": window, "block": block, "pool_blocks": pool_blocks}
    begin = used = 0
    for index, (length, count) in enumerate(zip(context_lens, counts, strict=True)):
        blocks = -(-_key_length(length, count, window, block) // block)
        if index > begin and (count != counts[begin] or used + blocks > pool_blocks):
            yield Run(begin=begin, end=index, count=counts[begin], **pool)
            begin, used = index, 0
        used += blocks
    yield Run(begin=begin, end=len(counts), count=counts[begin], **pool)


def _run_tables(batch: AttentionBatch, run: Run, lengths: StepLengths) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Block tables of a run, (B, N) int32, from the first block that the window includes; and a mask of the keys before the window,
    (B, S) bool, None if there is no window."""
    width = lengths.capacity(run.block)
    if run.window:
        width = min(width, -(-(run.window + run.count - 1) // run.block) + 1)
    return batch.derived(("npu", run, width), lambda: _make_tables(batch, run, width))


def _make_tables(batch: AttentionBatch, run: Run, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    begins_B, ends_B = (batch.table_ptr_B[run.begin + i : run.end + i] for i in (0, 1))
    hidden_BS = None
    if run.window:
        contexts_B = batch.context_lens_B[run.begin : run.end]
        first_B = (contexts_B - (run.count + run.window - 1)).clamp(min=0)
        begins_B = begins_B + first_B // run.block
        keys_S = torch.arange(width * run.block, device=first_B.device)
        hidden_BS = keys_S < (first_B % run.block).unsqueeze(1)
    tables_N = batch.tables_N
    if isinstance(batch.context_lens, HostReadGuard):  # a later step writes its longer table to this memory
        spare = tables_N.untyped_storage().nbytes() // tables_N.itemsize - tables_N.storage_offset()
        tables_N = tables_N.as_strided((spare,), (1,))
    index_BN = begins_B.unsqueeze(1) + torch.arange(width, device=tables_N.device)
    table_BN = tables_N[index_BN.clamp(max=len(tables_N) - 1)]
    return torch.where(index_BN < ends_B.unsqueeze(1), table_BN, 0).to(torch.int32), hidden_BS
