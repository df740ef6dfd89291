"""Sums over segments: the same tree on every layout, whichever rank has which segments."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from labinfer.comm.local import LocalCommunicator
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.models.layers.segmented_linear import SegmentedLinear
from labinfer.models.layers.segments import DEGREES, SUMMED_ROWS, SegmentSum, SumTree, without_segment
from labinfer.models.layers.sharding import shard_columns, shard_head_columns

SHARDS = {
    "4864 columns": partial(shard_columns, 4864),
    "44 columns": partial(shard_columns, 44),
    "14 heads over 2": partial(shard_head_columns, 14, 2, 8),
    "10 heads over 5": partial(shard_head_columns, 10, 5, 4),
    "2 heads": partial(shard_head_columns, 2, 2, 4),
}


@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)
def test_every_part_is_covered_by_subtrees_without_overlap(shard):
    tree = SumTree(shard)
    assert [begin for begin, _ in tree.segments][1:] == [end for _, end in tree.segments][:-1]
    for size in DEGREES:
        if size > 2 and shard is SHARDS["2 heads"]:
            continue
        nodes = [node for rank in range(size) for node in tree.cover(shard(size, rank))]
        assert nodes[0][0] == 0 and nodes[-1][1] == len(tree.segments)
        assert all(left[1] == right[0] for left, right in pairwise(nodes))


def test_degrees_that_split_evenly_have_one_subtree_for_each_rank():
    tree, shard = SumTree(SHARDS["4864 columns"]), SHARDS["4864 columns"]
    assert len(tree.segments) == 6
    assert [len(tree.cover(shard(size, rank))) for size in (1, 2, 4) for rank in range(size)] == [1] * 7
    assert max(len(tree.cover(shard(3, rank))) for rank in range(3)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_of_one_rank_follows_the_tree(dtype):
    """Values whose sum depends on the order: adding from left to right gives another result."""
    tp = TensorParallelCommunicator(LocalCommunicator())
    add = SegmentSum(SHARDS["4864 columns"], tp).add
    parts = [
        torch.tensor([[value]], dtype=dtype)
        for value in (2.0**20 if dtype == torch.float32 else 2.0**12,) + (0.06,) * 5
    ]
    tree = SumTree(SHARDS["4864 columns"])

    def expected(node):
        begin, end = node
        if end - begin == 1:
            return parts[begin].float().clone()
        left, right = tree.split(node)
        return expected(left) + expected(right)

    wanted = expected(tree.root).to(dtype)
    out = add(torch.empty(1, 1, dtype=dtype), *[part.clone() for part in parts])
    assert torch.equal(out, wanted)
    if dtype == torch.float32:
        assert not torch.equal(out, sum(parts, torch.zeros(1, 1)))


@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)
def test_additions_on_a_stack_follow_the_tree(shard):
    tree = SumTree(shard)

    def written(node) -> str:
        begin, end = node
        return str(begin) if end - begin == 1 else f"({' + '.join(map(written, tree.split(node)))})"

    stack: list[str] = []
    for segment, count in enumerate(tree.additions(tree.root)):
        stack.append(str(segment))
        for _ in range(count):
            last = stack.pop()
            stack[-1] = f"({stack[-1]} + {last})"
    assert stack == [written(tree.root)]


class CountingTp:
    """Rank 0 of 3 tensor-parallel ranks, of which all send the same; keeps the shapes of what is gathered."""

    rank, size = 0, 3

    def __init__(self):
        self.shapes = []

    def all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        self.shapes.append(tuple(own.shape))
        return [own.clone() for _ in range(self.size)]


@pytest.mark.parametrize("layer", ["linear", "experts"])
def test_sums_of_a_long_prompt_take_bounded_memory(compiled_functions, layer):
    """The float32 sums of all ranks are temporary, and no part of the memory that is set aside for a step."""
    tp, shard = CountingTp(), partial(shard_columns, 192)
    x_TF = torch.randn(2 * SUMMED_ROWS + 7, 64).bfloat16()
    if layer == "linear":
        functions = CpuFunctions(compiled_functions)
        matrices = SimpleNamespace(pack_weight=functions.pack_weight, linear=functions.linear, packing="")
        ctx = SimpleNamespace(
            tp=tp, dtype=torch.bfloat16, functions=SimpleNamespace(codes={}, matrices={"layer": matrices})
        )
        module = SegmentedLinear(192, shard, 16, False, ctx)
        for segment in module.segments:
            torch.nn.init.normal_(segment.weight)
            segment.pack()
        out_TO = module(x_TF)
        alone_TO = torch.cat([module(row_TF) for row_TF in x_TF.split(1)])
        tp.shapes = [shape for shape in tp.shapes if shape[1] > 1]
    else:
        sums = SegmentSum(shard, tp)
        parts = [torch.randn(len(x_TF), 16).bfloat16() for _ in sums.segments]
        out_TO = sums.add(torch.empty(len(x_TF), 16).bfloat16(), *parts)
        small = SegmentSum(shard, CountingTp())
        rows = zip(*(part.split(1) for part in parts), strict=True)
        alone_TO = torch.cat([small.add(torch.empty(1, 16).bfloat16(), *row) for row in rows])
    assert torch.equal(out_TO, alone_TO)
    assert tp.shapes == [(2, SUMMED_ROWS, 16), (2, SUMMED_ROWS, 16), (2, 7, 16)]


def test_path_of_a_segment_is_that_of_the_whole_module():
    assert without_segment("model.layers.3.mlp.experts.segments.10.biases") == "model.layers.3.mlp.experts.biases"
    assert without_segment("model.layers.3.mlp.down_proj.segments.0") == "model.layers.3.mlp.down_proj"
