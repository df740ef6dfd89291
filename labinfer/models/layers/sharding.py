"""Attention heads, MLP columns and experts of each TP rank. Pure arithmetic, without torch or a communicator."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.errors import UserError
from labinfer.comm.spmd.topology import shard_range

COLUMN_UNIT = 16
"""Granularity of MLP column ranges, if the width allows, which keeps shards SIMD-friendly."""


@dataclass(frozen=True)
class HeadShard:
    """Attention heads of one TP rank.

    Query heads are a contiguous range. Each KV head that they read is held whole; a KV head whose query heads are on several ranks is
    replicated on each of them.
    """

    query: tuple[int, int]
    kv: tuple[int, int]
    kv_of_query: tuple[int, ...]
    """Index of the KV head of each query head; both indices are local to this rank."""

    @property
    def head_ptr(self) -> tuple[int, ...]:
        """Query heads ``head_ptr[k]:head_ptr[k + 1]`` of this rank read its KV head k."""
        return *(self.kv_of_query.index(kv) for kv in range(self.num_kv)), self.num_query

    @property
    def num_query(self) -> int:
        return self.query[1] - self.query[0]

    @property
    def num_kv(self) -> int:
        return self.kv[1] - self.kv[0]


def shard_heads(num_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int, kind: str = "attention") -> HeadShard:
    """Heads of ``tp_rank``: whole KV groups if there are at least ``tp_size`` KV heads, otherwise a range of query heads.

    Args:
        kind: kind of the query heads, for the error.

    Raises:
        UserError: there are more TP ranks than query heads.
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


def shard_head_columns(
    num_heads: int, num_kv_heads: int, head_size: int, tp_size: int, tp_rank: int
) -> tuple[int, int]:
    """(begin, end) of the columns of ``tp_rank``'s query heads; see ``shard_heads``."""
    begin, end = shard_heads(num_heads, num_kv_heads, tp_size, tp_rank).query
    return begin * head_size, end * head_size


def shard_columns(num_columns: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """(begin, end) of the MLP columns of ``tp_rank``."""
    return shard_range(num_columns, tp_size, COLUMN_UNIT)[tp_rank]


def shard_experts(num_experts: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """(begin, end) of the experts that ``tp_rank`` holds whole; empty if there are more ranks than experts."""
    return shard_range(num_experts, tp_size)[tp_rank]
