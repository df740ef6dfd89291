"""The compiled choice of experts against the reference, and its bits in every batch."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.functions.cpu.routing import CpuRouting
from labinfer.functions.reference.route import route
from labinfer.functions.routing_rule import RouterWeights, RoutingRule
from labinfer.native import compiler

RULES = {
    "softmax": RoutingRule(num_chosen=3),
    "softmax as it is": RoutingRule(num_chosen=3, normalized=False),
    "sigmoid": RoutingRule(num_chosen=5, scores="sigmoid", scale=2.5),
    "groups": RoutingRule(num_chosen=4, scores="sigmoid", num_groups=4, num_chosen_groups=2),
    "groups by one": RoutingRule(num_chosen=4, normalized=False, num_groups=4, num_chosen_groups=2, num_group_best=1),
    "chosen": RoutingRule(num_chosen=3, scores="chosen"),
    "all": RoutingRule(num_chosen=12),
}
EXPERTS, HIDDEN = 12, 70
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so the functions are not used either"
)


@pytest.fixture(scope="module")
def cpu(compiled_functions) -> CpuRouting:
    return CpuRouting(compiled_functions)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def by_id(ids_TA: torch.Tensor, weights_TA: torch.Tensor, experts: int = EXPERTS) -> torch.Tensor:
    """Each expert's weight, (T, E)."""
    return torch.zeros(len(ids_TA), experts).scatter(1, ids_TA, weights_TA)


@pytest.mark.parametrize("dtype", CpuRouting.dtypes, ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("biased", [True, False])
def test_route_is_the_references(cpu, rule, dtype, biased):
    x, weight = torch.randn(23, HIDDEN).to(dtype), 0.2 * torch.randn(EXPERTS, HIDDEN)
    bias = 0.3 * torch.randn(EXPERTS) if biased else None
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    (ids, weights), wanted = (
        cpu.route(x, RouterWeights(weight, rule, bias), counts),
        route(x, RouterWeights(weight, rule, bias)),
    )
    assert torch.equal(ids.sort(1).values, wanted[0].sort(1).values)
    torch.testing.assert_close(by_id(ids, weights), by_id(*wanted), rtol=1e-5, atol=1e-7)
    assert torch.equal(counts, ids.flatten().bincount(minlength=EXPERTS))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_factors_of_experts_are_the_last_on_their_weights(cpu, rule):
    x, weight, factors = torch.randn(9, HIDDEN), 0.2 * torch.randn(EXPERTS, HIDDEN), torch.randn(EXPERTS)
    plain = route(x, RouterWeights(weight, rule))
    for implementation in (cpu.route, route):
        ids, weights = implementation(x, RouterWeights(weight, rule, scale_E=factors))
        torch.testing.assert_close(by_id(ids, weights), by_id(*plain) * factors, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_route_by_weights_in_bfloat16_is_that_by_the_same_numbers(cpu, dtype):
    x, weight = torch.randn(7, HIDDEN).to(dtype), torch.randn(EXPERTS, HIDDEN).bfloat16()
    for rows in (x, x[:1]):
        (ids, weights), wide = (
            cpu.route(rows, RouterWeights(weight, RULES["softmax"])),
            cpu.route(rows, RouterWeights(weight.float(), RULES["softmax"])),
        )
        assert torch.equal(ids, wide[0]) and torch.equal(weights, wide[1])
        torch.testing.assert_close(
            by_id(ids, weights), by_id(*route(rows, RouterWeights(weight, RULES["softmax"]))), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(1, 1, 1), (4, 5, 16), (5, 128, 33), (9, 7, 1024)])
def test_route_of_any_size(cpu, tokens, experts, hidden):
    x, weight, rule = torch.randn(tokens, hidden), torch.randn(experts, hidden), RoutingRule(num_chosen=1)
    for given in (x, x.repeat(1, 2)[:, :hidden]):  # rows that are apart, too
        assert torch.equal(cpu.route(given, RouterWeights(weight, rule))[0], route(x, RouterWeights(weight, rule))[0])
    assert cpu.route(x[:0], RouterWeights(weight, rule))[0].shape == (0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [HIDDEN, 77, 95])
def test_route_gives_a_token_the_same_bits_in_every_batch_and_with_any_threads(cpu, hidden, dtype):
    x, weight = torch.randn(30, hidden).to(dtype), torch.randn(EXPERTS, hidden)
    rule = replace(RULES["groups"], normalized=False)
    ids, weights = cpu.route(x, RouterWeights(weight, rule))
    for rows in ([0], [29, 3, 17], list(range(0, 30, 2))):
        got = cpu.route(x[rows], RouterWeights(weight, rule))
        assert torch.equal(got[0], ids[rows]) and torch.equal(got[1], weights[rows])
    for count in (1, 3, 7):
        with threads_of_torch(count):
            got = cpu.route(x, RouterWeights(weight, rule))
        assert torch.equal(got[0], ids) and torch.equal(got[1], weights)


def test_route_takes_the_first_among_equals_and_numbers_that_are_none(cpu):
    x, weight, rule = torch.ones(3, 8), torch.ones(EXPERTS, 8), RULES["softmax"]
    x[1] = float("nan")
    ids, weights = cpu.route(x, RouterWeights(weight, rule))
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert weights[[0, 2]].isfinite().all() and weights[1].isnan().all()
