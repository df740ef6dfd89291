"""Reference functions of a decode step: none of them waits for what an accelerator computes, and none makes an index on the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads
from labinfer.functions.delta_heads import DeltaHeads
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.mamba_heads import MambaHeads
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape
from labinfer.functions.reference import attention, delta_rule, mamba, quantized, sampling
from labinfer.functions.reference.experts import ReferenceExperts, experts
from labinfer.functions.reference.linear import linear, pack_weight
from labinfer.weights.codes import Codes, QuantLayout

CPU = torch.device("cpu")
READS = ("_local_scalar_dense", "nonzero", "_unique", "masked_select", "repeat_interleave.Tensor", "bincount")
"""Operations that wait for an accelerator: a number, or the size of the result, comes from its memory."""
FROM_HOST = ("lift_fresh", "_to_copy")
"""Operations that make a tensor from host numbers, or copy one."""


class Operations(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function).removeprefix("aten."))
        return function(*args, **kwargs or {})


def names_of(call, kinds: tuple[str, ...] = READS) -> list[str]:
    """Operations of ``kinds`` that ``call`` runs."""
    with Operations() as seen:
        call()
    assert seen.names, "nothing was seen"
    return [name for name in seen.names if name.startswith(kinds)]


def batch_of(counts: list[int], earlier: int = 3) -> AttentionBatch:
    lengths = [count + earlier for count in counts]
    batch = AttentionBatch.build(
        [0, *accumulate(counts)], lengths, [[2 * b, 2 * b + 1] for b in range(len(counts))], CPU
    )
    return replace(batch, state_slots_B=torch.arange(len(counts)))


def test_reads_are_seen():
    x = torch.tensor([1, 0, 2])
    assert names_of(x.nonzero) and names_of(x.unique) and names_of(lambda: x.repeat_interleave(x))


@pytest.mark.parametrize("first", [0, 2])
def test_experts_read_nothing_but_their_ids(first):
    shape = ExpertShape(4, 8, (0, 6), torch.float32)
    packed = ReferenceExperts(pack_weight, linear, None, shape, CPU)
    for index in range(4):
        packed.pack(index, torch.randn(12, 8), torch.randn(8, 6))
    ids = torch.tensor([[0, 3], [3, 5], [1, 0]])
    x, weights, mlps = torch.randn(3, 8), torch.rand(3, 2), ExpertMLPs(packed, first=first)
    assert names_of(lambda: experts(x, ids, weights, mlps)) == []


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 5, 1]])
def test_delta_rule_reads_nothing(counts):
    heads = DeltaHeads(torch.rand(3), torch.randn(3), torch.tensor([0, 0, 1]))
    batch, num_tokens = batch_of(counts), sum(counts)
    qkv, gates, state = torch.randn(num_tokens, 4 * 5 + 3 * 4), torch.randn(num_tokens, 6), torch.randn(3, 3, 5, 4)
    conv, taps = torch.randn(3, 3, 32), torch.randn(4, 32)

    def layer() -> None:
        delta_rule.delta_rule(delta_rule.causal_conv(qkv, taps, conv, batch), gates, state, batch, heads)

    assert names_of(layer) == []
    assert names_of(layer, FROM_HOST) == []  # a second layer of the step


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 5, 1]])
def test_selective_scan_reads_nothing(counts):
    each = {f"{name}_H": torch.rand(3) for name in ("rate", "bias", "skip")}
    heads = MambaHeads(**each, groups_H=torch.tensor([0, 0, 1]))
    batch, num_tokens = batch_of(counts), sum(counts)
    xbc, dt, state = torch.randn(num_tokens, 3 * 4 + 4 * 5), torch.randn(num_tokens, 3), torch.randn(3, 3, 5, 4)
    assert names_of(lambda: mamba.selective_scan(xbc, dt, state, batch, heads)) == []
    assert (
        names_of(lambda: mamba.selective_scan(xbc, dt, state, batch, heads), FROM_HOST) == []
    )  # a step's second layer


def test_part_of_a_batch_reads_no_block_table():
    """The tensors of this device have no values that could be read."""
    batch = AttentionBatch.build([0, 1, 4, 5], [9, 20, 3], [[7], [2, 3], [5]], torch.device("meta"))
    rows_R, part = batch.part([0, 2])
    assert (part.row_ptr, part.context_lens, part.table_ptr) == ([0, 1, 2], [9, 3], [0, 1, 2])
    assert (rows_R.shape, part.tables_N.shape) == ((2,), (2,))


def test_part_of_a_batch_has_the_blocks_and_states_of_its_sequences():
    batch = AttentionBatch.build([0, 1, 4, 5], [9, 20, 3], [[7], [2, 3], [5]], CPU)
    batch = replace(batch, state_slots_B=torch.tensor([4, 6, 8]))
    rows_R, part = batch.part([2, 1])
    assert rows_R.tolist() == [4, 1, 2, 3] and (part.row_ptr, part.context_lens) == ([0, 1, 4], [3, 20])
    assert (part.tables_N.tolist(), part.table_ptr) == ([5, 2, 3], [0, 1, 3]) and part.table_ptr_B.tolist() == [0, 1, 3]
    assert part.state_slots_B.tolist() == [8, 6] and part.context_lens_B.tolist() == [3, 20]


@pytest.mark.parametrize("head_ptr", [[0, 2, 4], [0, 1, 4]])
def test_attention_reads_nothing(head_ptr):
    batch, cache = batch_of([1, 1]), LayerCache.zeros(4, 4, (2, 8), torch.float32)
    heads = AttentionHeads(torch.tensor(head_ptr), 1.0, 0, None)
    call = lambda: attention.paged_attention(torch.randn(2, 4, 8), cache, batch, heads)  # noqa: E731
    assert names_of(call, (*READS, "_to_copy")) == []


@pytest.mark.parametrize("form", ["int8", "int4", "e2m1"])
def test_quantized_products_make_nothing_from_host_numbers(form):
    weight = torch.randn(8, 64)
    if form == "e2m1":
        layout = QuantLayout(bits=4, group=32, table="e2m1")
        codes = Codes.empty(layout, 8, (0, 64), CPU)
        codes.words.zero_(), codes.scales.fill_(1.0)
        packed = quantized.pack_codes(codes, torch.float32)
    else:
        packed = quantized.quantize_int8(weight) if form == "int8" else quantized.quantize_int4(weight, 32)
    x = torch.randn(2, 64)
    assert names_of(lambda: quantized.linear(x, packed), (*READS, "lift_fresh")) == []


def test_rounded_products_are_those_of_float64():
    """Around ties, where rounding a float32 product differs."""
    torch.manual_seed(0)
    y = torch.rand(4000, 1) * 100 + 0.01
    ties = torch.randint(-127, 127, (4000, 16)) + 0.5
    x = (ties.double() / y.double()).float()
    x = torch.cat(
        [x, x.nextafter(torch.tensor(9e9)), x.nextafter(torch.tensor(-9e9)), torch.randn(4000, 16) / y], dim=1
    )
    wanted = (x.double() * y.double()).round().float()
    assert torch.equal(quantized.rounded_product(x, y), wanted)
    assert not torch.equal((x * y).round(), wanted)


@pytest.mark.parametrize("peak", [1e-30, 1e-3, 1.0, 448.0, 1e30])
def test_rounded_rows_of_any_size_are_those_of_float64(peak):
    torch.manual_seed(1)
    x = torch.randn(50, 300) * peak
    x[3] = 0.0
    x[4, 7] = float("nan")
    peaks = x.abs().amax(1, keepdim=True)
    factors = torch.where(peaks > 0, torch.full_like(peaks, 127) / peaks, 0.0)
    got, wanted = quantized.rounded_product(x, factors), (x.double() * factors.double()).round().float()
    assert wanted.abs().nan_to_num().max() == 127 and torch.equal(
        got.nan_to_num(nan=999.0), wanted.nan_to_num(nan=999.0)
    )


def test_rows_of_the_host_are_drawn_as_they_are():
    logits = torch.randn(3, 7)
    assert sampling.drawn_rows_on_host(logits, [])[0] is logits
