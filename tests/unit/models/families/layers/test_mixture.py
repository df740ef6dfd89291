"""A mixture of experts: its router against scores written down anew, and every cut over ranks against one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labinfer.comm.local import LocalCommunicator
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.reference.route import choose
from labinfer.launch.providers import reference_registry
from labinfer.models.families.layers.mixture import Mixture, MixtureConfig
from labinfer.models.families.layers.router import RouterConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.hugging_face.stack import StackReader
from labinfer.weights.loader import pack_weights, weight_bytes, weight_slices
from labinfer.weights.slices import TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule

CPU = torch.device("cpu")
HIDDEN, COLUMNS, EXPERTS, CHOSEN = 24, 44, 7, 3
ROUTER = RouterConfig(num_experts=EXPERTS, num_chosen=CHOSEN, scores="sigmoid", bias_dims=1, scale=1.7)
MIXTURE = MixtureConfig(
    router=ROUTER,
    intermediate_size=COLUMNS,
    shared=GatedMLPConfig(intermediate_size=50, bias=True),
    shared_gate=True,
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


# Router.


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_router_weighs_the_best_by_their_scores(scores, normalized, biased):
    config = replace(ROUTER, scores=scores, normalized=normalized)
    logits, bias = torch.randn(20, EXPERTS), torch.randn(EXPERTS) if biased else None
    ids, weights = choose(logits, bias, config)
    for row, chosen, given in zip(logits, ids, weights, strict=True):
        exact = row.softmax(0) if scores == "softmax" else 1 / (1 + (-row).exp())
        ranked = exact if bias is None else exact + bias
        best = sorted(range(EXPERTS), key=lambda expert: -ranked[expert])[:CHOSEN]
        assert sorted(chosen.tolist()) == sorted(best)
        wanted = exact[chosen] / (exact[chosen].sum() if normalized else 1) * 1.7
        torch.testing.assert_close(given, wanted)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32


def test_router_stays_within_the_best_groups():
    config = replace(ROUTER, num_experts=12, num_groups=4, num_chosen_groups=2)
    logits, bias = torch.randn(50, 12), torch.randn(12) * 0.1
    ids, _ = choose(logits, bias, config)
    ranked = logits.sigmoid() + bias
    for row, chosen in zip(ranked, ids, strict=True):
        sums = [sum(sorted(row[begin : begin + 3].tolist())[1:]) for begin in range(0, 12, 3)]
        groups = sorted(range(4), key=lambda group: -sums[group])[:2]
        allowed = [expert for expert in range(12) if expert // 3 in groups]
        best = sorted(allowed, key=lambda expert: -row[expert])[:CHOSEN]
        assert sorted(chosen.tolist()) == sorted(best)


def test_router_decides_in_float32_for_16_bit_models():
    """Two experts that bfloat16 cannot tell apart."""
    layer = build(LocalCommunicator(), {}, dtype=torch.bfloat16)
    layer.gate.bias.zero_()
    layer.gate.weight.zero_()
    layer.gate.weight[2, 0], layer.gate.weight[5, 0] = 1.0, 1.0009765625
    ids, _ = layer.gate(torch.ones(1, HIDDEN, dtype=torch.bfloat16))
    assert ids[0, 0] == 5


# Layers over ranks.


class MadeUpTensors:
    """As much of a ``TensorReader`` as plain matrices need; tensors that are not there yet are made up."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def read_into(self, part: TensorSlice) -> None:
        tensor = self.tensors.setdefault(part.name.removesuffix(".weight"), torch.randn(part.shape) * 0.3)
        assert tensor.shape == part.shape
        part.destination.copy_(tensor[tuple(slice(*cut) for cut in part.ranges)])


def read_from(tensors: dict[str, torch.Tensor], stacked: bool = False):
    """A reader of slices of made-up tensors; per-expert ones, or those of a checkpoint that stacks them."""
    reader = MadeUpTensors(tensors)

    def read(part: WeightSlice) -> None:
        if isinstance(part, TensorSlice):
            reader.read_into(part)
        elif part.stack is not None and stacked:
            PlainFormat().read(StackReader(reader, part), replace(part, name=part.stack.name))
        else:
            PlainFormat().read(reader, part)

    return read


def make(comm, *, experts="columns", dtype=torch.float32, quantization="none") -> Mixture:
    """A rank's layer without weights."""
    ctx = StageContext(
        tp=TensorParallelCommunicator(comm),
        functions=reference_registry(32).select(CPU, dtype, quantization=quantization),
        dtype=dtype,
        first_layer=0,
        last_layer=1,
        is_first=True,
        is_last=True,
        experts=experts,
    )
    return Mixture(MIXTURE, HIDDEN, ctx)


def build(comm, tensors, *, stacked=False, **kinds) -> Mixture:
    """A rank's layer with its share of the tensors; those that are not there yet are made up."""
    layer, read = make(comm, **kinds), read_from(tensors, stacked)
    for name, module in layer.named_modules():
        if isinstance(module, WeightedModule):
            module.load(name, read)
    return layer


def dense(x: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer, one token and one expert at a time."""

    def mlp(row: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = (
            tensors[f"{name}.{kind}_proj"] @ row + tensors.get(f"{name}.{kind}_proj.bias", 0) for kind in ("gate", "up")
        )
        return tensors[f"{name}.down_proj"] @ (F.silu(gate) * up) + tensors.get(f"{name}.down_proj.bias", 0)

    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        scores = (tensors["gate"] @ row).sigmoid()
        ids = (scores + tensors["gate.e_score_correction_bias"]).topk(CHOSEN).indices
        weights = 1.7 * scores[ids] / scores[ids].sum()
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            out[token] += weight * mlp(row, f"experts.{expert}")
        out[token] += (tensors["shared_expert_gate"] @ row).sigmoid() * mlp(row, "shared_expert")
    return out


@pytest.mark.parametrize("experts", ["columns", "whole"])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 5, 8])
def test_mixture_over_ranks_is_the_dense_sum(experts, tp_size):
    """8 ranks have more of them than there are experts."""
    tensors: dict[str, torch.Tensor] = {}
    build(LocalCommunicator(), tensors)
    x = torch.randn(9, HIDDEN)

    def run(comm: LocalCommunicator) -> torch.Tensor:
        layer = build(comm, tensors, experts=experts)
        with torch.inference_mode():
            return layer(x)

    ranks = LocalCommunicator.run(tp_size, run) if tp_size > 1 else [run(LocalCommunicator())]
    torch.testing.assert_close(ranks[0], dense(x, tensors), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(rank, ranks[0]) for rank in ranks)


@pytest.mark.parametrize("experts", ["columns", "whole"])
def test_mixture_from_stacked_tensors_is_that_of_single_ones(experts):
    tensors: dict[str, torch.Tensor] = {}
    build(LocalCommunicator(), tensors)

    def stack(kind: str) -> torch.Tensor:
        return torch.stack([tensors[f"experts.{expert}.{kind}_proj"] for expert in range(EXPERTS)])

    stacked = tensors | {
        "experts.gate_up_proj": torch.cat([stack("gate"), stack("up")], dim=1),
        "experts.down_proj": stack("down"),
    }
    x = torch.randn(6, HIDDEN)
    for rank in range(3):
        comm = LocalCommunicator(rank=rank, size=3)
        single = build(comm, tensors, experts=experts)
        merged = build(comm, stacked, experts=experts, stacked=True)
        args = x, *single.gate(x)
        assert torch.equal(single.experts(*args), merged.experts(*args))


@pytest.mark.parametrize("experts", ["columns", "whole"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_mixture_on_the_meta_device_has_the_size_of_the_real_one(experts, quantization):
    for rank in range(3):
        comm = LocalCommunicator(rank=rank, size=3)
        real = build(comm, {}, experts=experts, quantization=quantization)
        with torch.device("meta"):
            planned = make(comm, experts=experts, quantization=quantization)
        pack_weights(planned)
        assert weight_bytes(planned) == weight_bytes(real)


@pytest.mark.parametrize("experts", ["columns", "whole"])
def test_ranks_together_read_every_expert_once(experts):
    read = 0
    for rank in range(4):
        with torch.device("meta"):
            layer = make(LocalCommunicator(rank=rank, size=4), experts=experts)
        parts = (part for part in weight_slices(layer) if part.name.startswith("experts."))
        read += sum(part.destination.numel() for part in parts)
    assert read == EXPERTS * 3 * HIDDEN * COLUMNS


def test_slices_of_an_expert_say_where_a_stack_has_them():
    layer = make(LocalCommunicator(rank=1, size=2))
    up = next(part for part in weight_slices(layer) if part.name == "experts.5.up_proj")
    assert up.stack.name == "experts.gate_up_proj" and up.stack.shape == (EXPERTS, 2 * COLUMNS, HIDDEN)
    assert (up.stack.index, up.stack.first_row, up.rows) == (5, COLUMNS, (22, COLUMNS))
