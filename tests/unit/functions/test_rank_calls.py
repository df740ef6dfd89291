"""Calls of a rank: what each needs and does, and which weights it is timed with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_calls import SETTING, all_calls, layer_calls, rank_calls, registry_with_rival

from labinfer.functions.autotune import TIMED_ROWS
from labinfer.functions.calls import PagedAttentionCall, RotateAndWriteCall
from labinfer.functions.expert_calls import ExpertsCall
from labinfer.functions.registry import OTHER_FUNCTIONS, FunctionRegistry, Implementation
from labinfer.launch.providers import reference_registry


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_every_function_can_be_timed(quantization, kv_dtype):
    setting = replace(SETTING, kv_dtype=kv_dtype)
    calls = rank_calls(reference_registry(), all_calls(quantization), setting)
    assert len(calls.candidates) == 12
    for target, candidates in calls.candidates.items():
        for rows in TIMED_ROWS:
            calls.bind(target, candidates["reference"], rows)()
            work = calls.work(target, candidates["reference"], rows)
            assert work.num_bytes > 0
            counted = ("paged_attention", "latent_attention", "experts", "delta_rule")
            assert (work.operations > 0) == (target.endswith("linear") or target in counted)


@pytest.mark.parametrize(
    "changes",
    [
        {"rotary_size": 8},
        {"rotary_size": 0},
        {"interleaved": True},
        {"norms": "before"},
        {"norms": "after"},
        {"kv_heads": 0},
    ]
    + [{"norms": "before", "value_norm": True}],
    ids=str,
)
def test_every_kind_of_rotation_can_be_timed(changes):
    call = replace(RotateAndWriteCall(heads=4, kv_heads=2, head_size=16, rotary_size=16), **changes)
    calls = rank_calls(reference_registry(), {call: 1})
    queries = calls.bind("rotate_and_write", calls.candidates["rotate_and_write"]["reference"], 4)()
    assert queries.shape == (4, 4, 16)


def test_work_of_a_product():
    calls = rank_calls(reference_registry())
    work = calls.work("layer.linear", calls.candidates["layer.linear"]["reference"], 4)
    elements = 96 * 64 + 64 * 32
    assert (work.operations, work.num_bytes) == (8 * elements, 2 * elements + 2 * 4 * (96 + 64 + 64 + 32))


def test_work_of_experts_is_that_of_those_that_are_chosen():
    """A token has two of eight experts; those of this rank, the first four, are half of what is chosen."""
    call = ExpertsCall(quantization="none", num_experts=4, all_experts=8, num_chosen=2, hidden_size=64, columns=32)
    calls = rank_calls(reference_registry(), {call: 1})
    elements, (reference,) = 3 * 64 * 32, calls.candidates["experts"].values()
    one, many = (calls.work("experts", reference, rows) for rows in (1, 256))
    activations = 2 * 64 * 2
    assert 0.6 < one.operations / (2 * elements) < 1.4
    assert one.num_bytes == one.operations + activations  # two bytes and two operations for each weight
    assert 0.9 < many.operations / (256 * 2 * elements) < 1.1
    assert many.num_bytes == 4 * elements * 2 + 256 * activations


def test_experts_that_take_turns_are_not_in_the_cache():
    call = ExpertsCall(quantization="none", num_experts=64, all_experts=64, num_chosen=2, hidden_size=8, columns=4)
    assert len(torch.cat(call.routings(1)).unique()) > 20
    assert all(torch.equal(a, b) for a, b in zip(call.routings(3), call.routings(3), strict=True))


def test_few_of_many_experts_are_made_to_be_timed():
    """All of a layer of 512 would take 400 MB even with 64 columns. Each of the few has as many tokens as it has among all."""
    call = ExpertsCall(
        quantization="none", num_experts=512, all_experts=512, num_chosen=10, hidden_size=2048, columns=512
    )
    cut = call.cut(16 * 2**20 / (2 * call.elements))
    assert 2 * cut.elements < 32 * 2**20
    assert cut.num_timed == 10 and cut.columns > 64
    for rows, tokens_each in ((1, 1), (64, 1.8), (256, 5.0)):
        counts = [torch.bincount(ids_TA.flatten(), minlength=513)[:10] for ids_TA in cut.routings(rows)]
        assert all(count.min() > 0 for count in counts), "some would not be read"
        assert torch.stack(counts).float().mean() == pytest.approx(tokens_each, rel=0.15)
    part_of_rank = replace(call, num_experts=64).cut(0.5)
    assert part_of_rank.num_timed == 32
    assert (torch.stack(part_of_rank.routings(1)) < 32).float().mean() == pytest.approx(64 / 512, abs=0.05)


def test_work_of_attention():
    """Four sequences with one new token see 257 tokens each; a part of a prompt sees 257, 258, …, 320."""
    calls = rank_calls(reference_registry())
    reference = calls.candidates["paged_attention"]["reference"]
    assert calls.work("paged_attention", reference, 4).operations == 4 * 4 * 16 * 4 * 257
    assert calls.work("paged_attention", reference, 64).operations == 4 * 4 * 16 * sum(range(257, 321))


def test_work_of_attention_in_a_window():
    """A part of a prompt reads the window before its first token as well."""
    calls = rank_calls(reference_registry(), all_calls(window=100))
    reference = calls.candidates["paged_attention"]["reference"]
    work = calls.work("paged_attention", reference, 64)
    assert work.operations == 4 * 4 * 16 * 64 * 100
    assert work.num_bytes == 163 * 2 * 2 * 16 * 2 + 2 * 64 * 4 * 16 * 2


def spy_weights(registry: FunctionRegistry, counts: dict, rounds: int) -> list[torch.Tensor]:
    """Weights that a target's products read, in order."""
    seen: list[torch.Tensor] = []
    registry.add("linear", Implementation(name="spy", call=lambda x, weight, bias=None: seen.append(weight.data)))
    calls = rank_calls(registry, counts)
    run = calls.bind("layer.linear", calls.candidates["layer.linear"]["spy"], 1)
    for _ in range(rounds):
        run()
    return seen


def test_weights_come_in_turn_as_layers_do():
    seen = [weight.data_ptr() for weight in spy_weights(reference_registry(), layer_calls(), 4)]
    assert len(set(seen)) == 3 * 2 and seen[:2] == seen[6:]  # three layers of two matrices


def test_products_are_timed_as_often_as_they_are_made():
    """One matrix in three layers and another in six: two of the other for each."""
    counts = layer_calls(((96, 64),), 3) | layer_calls(((64, 32),), 6)
    shapes = [tuple(weight.shape) for weight in spy_weights(reference_registry(), counts, 1)]
    assert shapes == [(96, 64), (64, 32), (64, 32)]
    counts = layer_calls(((96, 64),), 1) | layer_calls(((64, 32),), 1000)
    shapes = [tuple(weight.shape) for weight in spy_weights(reference_registry(), counts, 1)]
    assert shapes == [(96, 64)] + 16 * [(64, 32)]


def test_attention_of_different_windows_is_timed_together():
    windows = []
    registry = reference_registry()
    registry.add("paged_attention", Implementation(name="spy", call=lambda *args: windows.append(args[-1].window)))
    full, sliding = (PagedAttentionCall(head_ptr=(0, 2), head_size=16, window=window) for window in (0, 9))
    calls = rank_calls(registry, {full: 4, sliding: 20})
    calls.bind("paged_attention", calls.candidates["paged_attention"]["spy"], 1)()
    assert windows == [0] + 5 * [9]


def test_target_has_weights_of_one_quantization():
    with pytest.raises(ValueError, match="reads weights of int4, none"):
        rank_calls(reference_registry(), layer_calls() | layer_calls(quantization="int4"))


def test_part_of_large_matrices_is_timed():
    calls = rank_calls(reference_registry(), layer_calls(((100_000, 2048), (2048, 512)), 1))
    work = calls.work("layer.linear", calls.candidates["layer.linear"]["reference"], 1)
    assert 15 * 2**20 < work.num_bytes < 17 * 2**20


def test_bytes_of_all_weights_follow_from_those_of_the_timed_part():
    for matrices in (((96, 64), (64, 32)), ((100_000, 2048), (2048, 512))):
        calls = rank_calls(reference_registry(), layer_calls(matrices, 2))
        reference = calls.candidates["layer.linear"]["reference"]
        elements = 2 * sum(outputs * inputs for outputs, inputs in matrices)
        assert calls.packed_bytes("layer.linear", reference) == pytest.approx(2 * elements)


def test_function_the_user_chose_is_not_timed():
    calls = rank_calls(registry_with_rival(), overrides={"linear": "slow"})
    assert set(calls.contested()) == {"latent_attention"}


def test_reference_code_is_not_autotuned():
    registry = reference_registry()
    registry.add("linear", Implementation(name="other", call=torch.nn.functional.linear, quantization="int8"))
    assert "layer.linear" not in rank_calls(registry, all_calls("int8")).contested()
    registry.add("linear", Implementation(name="third", call=torch.nn.functional.linear, quantization="int8"))
    assert list(rank_calls(registry, all_calls("int8")).contested()["layer.linear"]) == ["other", "third"]


def test_short_functions_of_the_reference_are_not_autotuned():
    """What Python takes for them is noise, and none of them could be captured."""
    registry = reference_registry()
    for function in ("linear", *OTHER_FUNCTIONS):
        registry.add(function, Implementation(name="other", call=lambda *_: None))
    contested = {target.rpartition(".")[2] for target in rank_calls(registry, all_calls()).contested()}
    assert contested == {"linear", "latent_attention"}  # whose forms are products
