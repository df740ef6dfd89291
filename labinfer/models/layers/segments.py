"""Sums over a sharded dimension whose bits do not depend on the tensor-parallel degree.

The dimension is cut into segments at the shard bounds of every degree in ``DEGREES``. Each segment has a partial result of its own, and
the partial results are added in float32 along one binary tree, whichever rank has which segments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch.overrides import handle_torch_function, has_torch_function

from labinfer.base.errors import UserError
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.packed_weight import PackedWeight
from labinfer.functions.segmented_weight import SegmentedWeight
from labinfer.weights.slices import Range

DEGREES = (1, 2, 4, 3)
"""Tensor-parallel degrees that give bit-identical sums. The tree splits a range of segments at the bounds of degree 2 first, then at those of 4 and 3, so
that with degrees 2 and 4 most ranks have one subtree."""

Shard = Callable[[int, int], Range]
"""(tensor-parallel degree, tensor-parallel rank) → (begin, end) of the rank's part of the dimension."""
Node = tuple[int, int]
"""A node of the tree, as (first segment, end) of its subtree."""
SUMMED_ROWS = 512
"""Rows whose float32 sums are in memory at once: a long prompt needs no more memory than these rows."""
SEGMENT = re.compile(r"\.segments\.\d+")


class SumTree:
    """The segments of a dimension, and the binary tree along which their partial results are added.

    Args:
        shard: part of the dimension of each rank, for any degree; raises ``UserError`` for a degree that the layer does not support.
    """

    def __init__(self, shard: Shard):
        degrees: dict[int, int] = {}
        for priority, size in enumerate(DEGREES):
            try:
                ranges = [shard(size, rank) for rank in range(size)]
            except UserError:  # more ranks than heads
                continue
            for bound in (bound for each in ranges for bound in each):
                degrees.setdefault(bound, priority)
        self._bounds = sorted(degrees)
        self._priorities = [degrees[bound] for bound in self._bounds]
        self.segments: list[Range] = list(pairwise(self._bounds))
        """(begin, end) of each segment."""

    @property
    def root(self) -> Node:
        """The tree of all segments."""
        return 0, len(self.segments)

    def split(self, node: Node) -> tuple[Node, Node]:
        """The two subtrees of a node with several segments."""
        begin, end = node
        middle = min(range(begin + 1, end), key=lambda i: (self._priorities[i], abs(2 * i - begin - end), i))
        return (begin, middle), (middle, end)

    def cover(self, part: Range, node: Node | None = None) -> list[Node]:
        """The fewest subtrees that together have exactly the segments of ``part``, a rank's part of the dimension."""
        begin, end = node or self.root
        if begin == end or self._bounds[end] <= part[0] or self._bounds[begin] >= part[1]:
            return []
        if part[0] <= self._bounds[begin] and self._bounds[end] <= part[1]:
            return [(begin, end)]
        return [each for half in self.split((begin, end)) for each in self.cover(part, half)]

    def additions(self, node: Node) -> list[int]:
        """Number of additions after each segment of ``node``, see ``SegmentedWeight.additions``."""
        if node[1] - node[0] == 1:
            return [0]
        left, right = map(self.additions, self.split(node))
        return [*left, *right[:-1], right[-1] + 1]

    def add(self, node: Node, sums: dict[Node, torch.Tensor]) -> torch.Tensor:
        """Sum of ``node`` in float32.

        Args:
            sums: sums of subtrees in any float dtype; the float32 ones are overwritten.
        """
        if node in sums:
            return sums[node].float()
        left, right = self.split(node)
        return self.add(left, sums).add_(self.add(right, sums))


class SegmentSum:
    """Sum of partial results over the segments of all ranks.

    Args:
        shard: see ``SumTree``.
        tp: the ranks that have the segments.
    """

    def __init__(self, shard: Shard, tp: TensorParallelCommunicator):
        self._tree, self._tp = SumTree(shard), tp
        covers = [self._tree.cover(shard(tp.size, rank)) for rank in range(tp.size)]
        self._covers, self._own = covers, covers[tp.rank]
        self._most = max(map(len, covers))
        self.segments = [(i, self._tree.segments[i]) for begin, end in self._own for i in range(begin, end)]
        """Number and (begin, end) of each of this rank's segments."""

    @property
    def is_local(self) -> bool:
        """Whether this rank has all segments."""
        return self._tp.size == 1

    def weight(self, matrices: Iterable[PackedWeight]) -> SegmentedWeight:
        """The matrices of this rank's segments. Their product is the sum over all segments if ``is_local``, else the argument ``own`` of ``add_ranks``."""
        additions = [count for node in self._own for count in self._tree.additions(node)]
        num_sums = 0 if self.is_local else self._most
        return SegmentedWeight(segments=tuple(matrices), additions=tuple(additions), num_sums=num_sums)

    def add(self, out: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        """Write the sum to ``out``; collective over the ranks.

        Args:
            parts: partial result of each segment of this rank, in order, with the shape of ``out``.
        """
        if has_torch_function((out,)):  # a capture records this as one operation
            return handle_torch_function(self.add, (out,), out, *parts)
        for blocks in zip(*(each.split(SUMMED_ROWS) for each in (out, *parts)), strict=True):
            self._add_block(*blocks)
        return out

    def _add_block(self, out: torch.Tensor, *parts: torch.Tensor) -> None:
        sums: dict[Node, torch.Tensor] = {(i, i + 1): part for (i, _), part in zip(self.segments, parts, strict=True)}
        if self.is_local:
            out.copy_(self._tree.add(self._tree.root, sums))
            return
        own = self.empty_sums(out, out.shape)
        for index, node in enumerate(self._own):
            own[index] = self._tree.add(node, sums)
        self.add_ranks(out, own)

    def empty_sums(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Uninitialized float32 sums of this rank's subtrees, (sums, *shape)."""
        return like.new_empty(self._most, *shape, dtype=torch.float32)

    def add_ranks(self, out: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Write the sum over the ranks to ``out``; collective.

        Args:
            own: sums of this rank's subtrees, see ``empty_sums``.
        """
        if has_torch_function((out,)):
            return handle_torch_function(self.add_ranks, (out,), out, own)
        gathered = self._tp.all_gather(own)
        sums = {
            node: rank_sums[index]
            for nodes, rank_sums in zip(self._covers, gathered, strict=True)
            for index, node in enumerate(nodes)
        }
        return out.copy_(self._tree.add(self._tree.root, sums))

    add.repeats_in_place = add_ranks.repeats_in_place = True


def without_segment(path: str) -> str:
    """``path`` without ``.segments.N``: the path that the module has in a layer that is not cut into segments."""
    return SEGMENT.sub("", path)
