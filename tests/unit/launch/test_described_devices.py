"""What providers say about devices, which every rank asks also for devices that its own torch does not know."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from labinfer.base.config import EngineOptions
from labinfer.base.registry import REGISTRY
from labinfer.functions.device import Device
from labinfer.functions.graph import Graph
from labinfer.functions.provider import Provider
from labinfer.launch.device_defaults import with_device_defaults
from labinfer.launch.providers import describe_device
from labinfer.weights.codes import QuantLayout
from labinfer.worker.step_graphs import StepGraphs, find_capture

INT8, INT4 = QuantLayout(8), QuantLayout(4, 32)


class Card(Provider):
    """A card that captures steps without collectives, and multiplies int8."""

    device = Device(
        type="card",
        collectives="cardcl",
        block_size=128,
        captures=lambda tp_size: tp_size == 1,
        multiplies=lambda form: form == INT8,
    )

    def register(self, registry, group_size):
        pass

    def capture(self):
        return lambda run, dry_run, batch=None: (run(), None)


class OtherCard(Card):
    device = Device(type="card", block_size=64)


@pytest.fixture
def registered() -> Iterator[None]:
    REGISTRY.register("function_provider", "card")(Card)
    yield
    del REGISTRY._entries["function_provider"]["card"]


def test_a_registered_provider_describes_its_device(registered):
    described = describe_device("card")
    assert described is Card.device and described.collectives == "cardcl" and described.block_size == 128
    assert described.multiplies(INT8) and not described.multiplies(INT4)


def test_a_device_without_a_provider_has_the_defaults():
    described = describe_device("card")
    assert not described.collectives and described.block_size == 16
    assert not described.multiplies(INT8) and not described.captures(1)


def test_the_last_provider_of_a_device_describes_it(registered):
    REGISTRY.register("function_provider", "other-card")(OtherCard)
    try:
        assert describe_device("card") is OtherCard.device
    finally:
        del REGISTRY._entries["function_provider"]["other-card"]


@pytest.mark.parametrize(
    ("device_type", "collectives", "captured"),
    [("cpu", "gloo", [True, True]), ("cuda", "nccl", [True, False]), ("npu", "hccl", [True, False])],
)
def test_devices_that_ship(device_type, collectives, captured):
    described = describe_device(device_type)
    assert described.collectives == collectives
    assert [described.captures(tp_size) for tp_size in (1, 2)] == captured


@pytest.mark.parametrize(
    ("form", "is_held"),
    [
        (QuantLayout(8), True),
        (QuantLayout(8, 128), True),
        (QuantLayout(4, 32, has_minima=True), True),
        (QuantLayout(4, 64, table="e2m1"), True),
        (QuantLayout(4, 16), False),
        (QuantLayout(4), False),
        (QuantLayout(5, 32), False),
    ],
)
def test_gpus_hold_the_forms_that_the_kernel_multiplies(form, is_held):
    assert describe_device("cuda").multiplies(form) == is_held


def test_steps_with_collectives_are_captured_only_if_the_provider_says_so():
    card, other = Card(), Provider()
    assert find_capture([other, card], 1) is not None and find_capture([other, card], 2) is None
    assert find_capture([other], 1) is None


def test_a_graph_is_given_the_batch_that_it_replays():
    """So that kernels that take context lengths from the host can be updated."""
    seen = []

    class Replayed(Graph):
        num_bytes = program_bytes = 0

        def replay(self, batch=None):
            seen.append(batch)

    out = torch.zeros(1, 2)
    graphs = StepGraphs(lambda batch, hidden: out, lambda run, dry_run, batch: (run(), Replayed()), 1 << 20)
    batches = [_decode(length) for length in (4, 5)]
    for batch in batches:
        graphs(batch, None)
    assert seen == [batches[1].attention] and seen[0].context_lens == [5]


def _decode(length: int):
    """A decode of one sequence, whose tensors have equal places at every length."""
    return SimpleNamespace(
        attention=SimpleNamespace(context_lens=[length]),
        token_ids_T=torch.zeros(1, dtype=torch.int64),
        output_rows=None,
        graph_key=(1, 1, 1),
    )


@pytest.mark.parametrize(
    ("devices", "given", "size"),
    [
        (("cpu",), 0, 16),
        (("card:1",), 0, 128),
        (("cpu", "card"), 0, 128),
        (("auto",), 0, 128),
        (("card",), 32, 32),
        (("unknown",), 0, 16),
    ],
)
def test_a_run_takes_the_largest_block_size_that_its_devices_prefer(registered, devices, given, size):
    options = EngineOptions.from_flat({"device": list(devices), **({"block_size": given} if given else {})})
    everyone = [SimpleNamespace(accelerator=accelerator) for accelerator in ("", "card")]
    assert with_device_defaults(options, everyone).cache.tokens_per_block == size
