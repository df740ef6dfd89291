"""Attention heads, MLP columns and experts of each tp rank. Pure arithmetic: nothing here knows torch or a communicator."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.errors import UserError
from labinfer.comm.spmd.topology import shard_range

COLUMN_UNIT = 16
"""MLP columns are cut in runs of this many where the width allows, so that slices stay friendly to SIMD."""


@dataclass(frozen=True)
class HeadShard:
    """The attention heads of one tp rank.

    Query heads are a contiguous range. Each KV head it reads is held whole; a KV head that serves the query heads
    of several ranks is held by each of them.
    """

    query: tuple[int, int]
    kv: tuple[int, int]
    kv_of_query: tuple[int, ...]
    """For each of this rank's query heads, the index of its KV head among this rank's KV heads."""

    @property
    def head_ptr(self) -> tuple[int, ...]:
        """KV head k serves this rank's query heads ``head_ptr[k]:head_ptr[k + 1]``."""
        return *(self.kv_of_query.index(kv) for kv in range(self.num_kv)), self.num_query

    @property
    def num_query(self) -> int:
        return self.query[1] - self.query[0]

    @property
    def num_kv(self) -> int:
        return self.kv[1] - self.kv[0]


def shard_heads(num_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int, kind: str = "attention") -> HeadShard:
    """The heads of ``tp_rank``: whole KV groups while there are enough of them, query heads beyond that.

    Args:
        kind: of the query heads, for the error.

    Raises:
        UserError: there are more tp ranks than query heads.
    """
    if tp_size > num_heads:
        raise UserError(
            f"--tensor-parallel-size {tp_size} is more than the model's {num_heads} {kind} heads; use at most {num_heads}"
        )
    group = num_heads // num_kv_heads
    if tp_size <= num_kv_heads:
        begin, end = shard_range(num_kv_heads, tp_size)[tp_rank]
        query = (begin * group, end * group)
    else:
        query = shard_range(num_heads, tp_size)[tp_rank]
    kv = (query[0] // group, (query[1] - 1) // group + 1)
    return HeadShard(query, kv, tuple(head // group - kv[0] for head in range(*query)))


def shard_columns(num_columns: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """The (begin, end) MLP columns of ``tp_rank``."""
    return shard_range(num_columns, tp_size, COLUMN_UNIT)[tp_rank]


def shard_experts(num_experts: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """The (begin, end) experts that ``tp_rank`` holds whole; none where there are more ranks than experts."""
    return shard_range(num_experts, tp_size)[tp_rank]
