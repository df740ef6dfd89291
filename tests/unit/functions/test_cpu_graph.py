"""Graphs of compiled calls: the same again for other numbers in the same memory, and what cannot be captured."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from labinfer.comm.local import LocalCommunicator
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.cpu.graph import CpuCapture
from labinfer.functions.cpu.routing import CpuRouting
from labinfer.functions.cpu.sampling import CpuSampling
from labinfer.functions.reference import linear as reference
from labinfer.functions.routing_rule import RouterWeights, RoutingRule

SIZE, OUTPUTS = 48, 70
ROWS = torch.tensor([0, 2])


@pytest.fixture
def step(compiled_functions):
    """A norm, a product and torch's operations between them, over x, gate and numbers of rows in a table."""
    torch.manual_seed(0)
    functions = CpuFunctions(compiled_functions)
    weight = functions.pack_weight(torch.randn(OUTPUTS, SIZE).bfloat16())
    scale, table = torch.randn(SIZE).bfloat16(), torch.randn(9, SIZE).bfloat16()

    def run(x: torch.Tensor, gate: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        hidden, normed = functions.add_rms_norm(x.clone(), table[numbers], scale, 1e-5)
        both = functions.linear(normed, weight)
        left, right = both[:, : OUTPUTS // 2].contiguous(), both[:, OUTPUTS // 2 :]
        return (left * right.sigmoid()).view(-1) + hidden[:, :1] * gate

    return run


def numbers(rows: int = 2) -> list[torch.Tensor]:
    x, gate = torch.randn(rows, SIZE).bfloat16(), torch.randn(rows * OUTPUTS // 2).bfloat16()
    return [x, gate, torch.randint(9, (rows,))]


@torch.inference_mode()
def test_graph_does_the_same_for_other_numbers_in_the_same_places(compiled_functions, step):
    places = numbers()
    out, graph = CpuCapture(compiled_functions)(lambda: step(*places))
    assert torch.equal(out, step(*places))
    for _ in range(3):
        for place, new in zip(places, numbers(), strict=True):
            place.copy_(new)
        expected = step(*places)
        scratch = [
            torch.full((100, SIZE), float("nan")) for _ in range(50)
        ]  # memory that was given back is used by others
        graph.replay()
        del scratch
        assert torch.equal(out, expected)


@torch.inference_mode()
def test_graph_keeps_structures_that_calls_are_given_alive(compiled_functions):
    x, weight, counts = torch.randn(1, SIZE), torch.randn(16, SIZE), torch.zeros(16, dtype=torch.int64)
    route = CpuRouting(compiled_functions).route
    rule = RoutingRule(num_chosen=3)
    out, graph = CpuCapture(compiled_functions)(lambda: route(x, RouterWeights(weight, rule), counts)[0])
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, route(x, RouterWeights(weight, rule))[0])
    assert counts.sum() == 4 * 3


@torch.inference_mode()
@pytest.mark.parametrize("rows", [2, 40])
def test_results_are_not_written_by_graphs_that_share_their_memory(compiled_functions, step, rows):
    capture, outs, graphs = CpuCapture(compiled_functions), [], []
    for number in range(8):
        places = numbers(rows)
        run = partial(step, *places)
        out, graph = capture(run if number % 4 else lambda run=run: (ROWS.sum(), run())[1])  # which is not captured
        outs.append(out)
        graphs += [graph] if number % 4 else []
    expected = [out.clone() for out in outs]
    for graph in graphs:
        graph.replay()
        assert all(map(torch.equal, outs, expected))


@torch.inference_mode()
def test_step_without_a_result_is_not_captured(compiled_functions):
    """As that of a head on all but the first rank of a stage."""
    assert CpuCapture(compiled_functions)(lambda: ROWS.tolist() and None) == (None, None)


class Doubling(LocalCommunicator):
    """Two ranks that have the same."""

    def __init__(self):
        super().__init__()
        self.size = 2

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(tensor)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 40])
def test_sums_with_other_ranks_are_done_again(compiled_functions, rows):
    functions, tp = CpuFunctions(compiled_functions), TensorParallelCommunicator(Doubling())
    x, weight = torch.randn(rows, SIZE).bfloat16(), torch.randn(OUTPUTS, SIZE).bfloat16()
    packed = functions.pack_weight(weight.clone())
    out, graph = CpuCapture(compiled_functions)(lambda: tp.all_reduce(functions.linear(x, packed)).view(-1))
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, 2 * functions.linear(x, packed).view(-1))
    assert not graph.num_bytes  # none of the memory of the sums is kept from others


@torch.inference_mode()
def test_products_of_torch_are_captured(compiled_functions):
    """They are the fastest on some processors."""
    x, weight, bias = (
        torch.randn(2, SIZE).bfloat16(),
        torch.randn(OUTPUTS, SIZE).bfloat16(),
        torch.randn(SIZE).bfloat16(),
    )

    def run() -> torch.Tensor:
        return F.linear(F.linear(x, weight, None), weight.t(), bias)

    out, graph = CpuCapture(compiled_functions)(run)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(out, run())


@torch.inference_mode()
def test_embedding_of_torch_is_captured(compiled_functions):
    """It goes with torch's product for the head, where that is chosen; a vocabulary may be cut, so that a rank has no row of some tokens."""
    table, token_ids = reference.pack_weight(torch.randn(9, SIZE)), torch.tensor([4, 12, 3])
    out, graph = CpuCapture(compiled_functions)(lambda: reference.embedding(token_ids, table, 4).clone())
    for ids in ([5, 4, 13], [12, 0, 7]):
        token_ids.copy_(torch.tensor(ids))
        graph.replay()
        assert torch.equal(out, torch.stack([table.data[i - 4] if 4 <= i < 13 else torch.zeros(SIZE) for i in ids]))


@torch.inference_mode()
def test_joined_activations_are_captured(compiled_functions):
    x, y = torch.randn(2, SIZE).bfloat16(), torch.randn(2, 3).bfloat16()

    def run() -> torch.Tensor:
        return torch.cat((F.gelu(x, approximate="tanh"), y), dim=1)

    out, graph = CpuCapture(compiled_functions)(run)
    for _ in range(2):
        x.normal_(), y.normal_()
        graph.replay()
        assert torch.equal(out, run())


@torch.inference_mode()
def test_what_python_decides_is_decided_again(compiled_functions):
    """Calls and torch's operations in it are not seen by the capture."""
    x, larger = torch.tensor([1.0, 2.0]), torch.empty(1)

    def choose() -> None:
        larger.copy_(CpuSampling(compiled_functions).argmax(x[None]) if x.sum().item() > 0 else -x.max())

    def run() -> torch.Tensor:
        compiled_functions.run(choose)
        return larger.add(larger)

    out, graph = CpuCapture(compiled_functions)(run)
    assert out.tolist() == [2]
    for new, expected in (([5, 4], 0), ([-5, -4], 8)):
        x.copy_(torch.tensor(new))
        graph.replay()
        assert out.tolist() == [expected]


@pytest.mark.parametrize(
    "run",
    [
        lambda library, x: x + x.sum().item(),
        lambda library, x: x + x[0].tolist()[0],
        lambda library, x: x + len(x.numpy()),
        lambda library, x: x * 2.0,
        lambda library, x: x.add_(x),
        lambda library, x: x.softmax(dim=-1),
        lambda library, x: x[ROWS, ROWS],
        lambda library, x: CpuSampling(library).argmax(x),
    ],
    ids=["item", "list", "array", "number", "in place", "other operation", "two indices", "call that is not replayed"],
)
@torch.inference_mode()
def test_what_cannot_be_captured_runs_without_a_graph(compiled_functions, run):
    x = torch.arange(12.0).view(3, 4)
    expected = run(compiled_functions, x.clone())
    out, graph = CpuCapture(compiled_functions)(lambda: run(compiled_functions, x))
    assert graph is None and torch.equal(out, expected)


@torch.inference_mode()
def test_log_names_what_cannot_be_captured(compiled_functions, caplog):
    caplog.set_level(logging.DEBUG)
    CpuCapture(compiled_functions)(lambda: torch.ones(2).cumsum(0).exp())
    assert "ones cannot be captured" in caplog.text


@torch.inference_mode()
def test_error_ends_the_capture(compiled_functions):
    with pytest.raises(ZeroDivisionError):
        CpuCapture(compiled_functions)(lambda: 1 / 0)
    assert compiled_functions.observer is None
