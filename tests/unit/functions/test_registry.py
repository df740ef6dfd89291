"""The registry: which implementation a flag, a choice or nothing at all selects, and what is refused."""

from __future__ import annotations

import pytest
import torch

from labinfer.base.errors import UserError
from labinfer.functions.dispatch import DispatchByBatchSize
from labinfer.functions.reference.elementwise import silu_and_mul
from labinfer.functions.reference.linear import embedding, linear, pack_weight
from labinfer.functions.registry import FunctionRegistry, Implementation
from labinfer.launch.providers import parse_overrides, reference_registry

CPU = torch.device("cpu")


def test_later_implementations_are_preferred_where_they_suit():
    registry = reference_registry()
    registry.add(
        "silu_and_mul", Implementation(name="fast", call=lambda *_: "fast", devices=("cpu",), dtypes=(torch.bfloat16,))
    )
    assert registry.select(CPU, torch.bfloat16).silu_and_mul() == "fast"
    assert registry.select(CPU, torch.float32).silu_and_mul is silu_and_mul
    assert registry.select(torch.device("meta"), torch.bfloat16).silu_and_mul is silu_and_mul
    assert registry.select(CPU, torch.bfloat16, parse_overrides(("reference",))).silu_and_mul is silu_and_mul
    assert registry.select(CPU, torch.bfloat16, parse_overrides(("silu_and_mul=fast",))).silu_and_mul() == "fast"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "linear=fastest",
            "--functions linear=fastest: no such implementation for cpu in float32; choose one of reference",
        ),
        ("relu=reference", "unknown function; available: pack_weight, pack_codes"),
        ("quick", "--functions pack_weight=quick: no such implementation for cpu"),
    ],
)
def test_implementations_nobody_knows_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        reference_registry().select(CPU, torch.float32, parse_overrides((given,)))


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        ("linear", "cpu in bfloat16, weights in int4"),
        ("embedding", "cpu in bfloat16, weights in int4"),
        ("argmax", "cpu in bfloat16"),
    ],
)
def test_name_that_is_unknown_is_refused_with_the_weights_that_it_is_not_for(function, operands):
    with pytest.raises(UserError, match=f"{function}=quick: no such implementation for {operands}; choose"):
        reference_registry().check(CPU, torch.bfloat16, {function: "quick"}, "int4")


def packing_registry() -> FunctionRegistry:
    """Two layouts of weights; in one of them two implementations may take turns."""
    registry = reference_registry()
    for name in ("pack_weight", "embedding"):
        registry.add(name, Implementation(name="packed", call=lambda *_, name=name: f"packed {name}", layout="panels"))
    for name in ("packed", "packed-too"):
        registry.add("linear", Implementation(name=name, call=lambda *_, name=name: name, layout="panels"))
    return registry


def linear_by_rows(functions) -> list[str]:
    return [functions.linear(torch.empty(rows, 2), None, None) for rows in (1, 2, 8, 9, 32, 33, 128, 129, 1000)]


def test_the_class_of_rows_says_which_implementation_runs():
    names = ["packed", "packed-too", "packed", "packed-too", "packed"]
    functions = packing_registry().select(CPU, torch.float32, choice={"layer.linear": names})
    assert linear_by_rows(functions.matrices["layer"]) == [names[i] for i in (0, 1, 1, 2, 2, 3, 3, 4, 4)]
    assert linear_by_rows(functions.matrices["vocabulary"]) == ["packed-too"] * 9  # the preferred one
    assert functions.matrices["layer"].pack_weight(None) == "packed pack_weight"
    both = DispatchByBatchSize([lambda x_TD, *, first: ("few", first), *[lambda x_TD, *, first: ("many", first)] * 4])
    assert both(torch.ones(1, 2), first=3) == ("few", 3) and both(torch.ones(99, 2), first=3) == ("many", 3)
    same = packing_registry().select(CPU, torch.float32, choice={"layer.linear": ["packed"] * 5})
    assert not isinstance(same.matrices["layer"].linear, DispatchByBatchSize)


def test_a_choice_of_another_layout_packs_for_it():
    functions = packing_registry().select(CPU, torch.float32, choice={"vocabulary.linear": ["reference"] * 5})
    assert (
        functions.matrices["vocabulary"].linear is linear
        and functions.matrices["vocabulary"].pack_weight is pack_weight
    )
    assert functions.matrices["vocabulary"].embedding is embedding
    assert functions.matrices["layer"].embedding(None) == "packed embedding"


@pytest.mark.parametrize("choice", [None, {"layer.linear": ["reference"] * 5, "vocabulary.linear": ["packed"] * 5}])
def test_flags_overrule_the_choice(choice):
    def selected(given: str):
        return packing_registry().select(CPU, torch.float32, parse_overrides((given,)), choice=choice)

    assert linear_by_rows(selected("linear=packed").matrices["layer"]) == ["packed"] * 9
    assert selected("linear=packed").matrices["layer"].pack_weight(None) == "packed pack_weight"
    assert selected("linear=reference").matrices["vocabulary"].pack_weight is pack_weight
    assert selected("pack_weight=packed").matrices["layer"].linear(torch.empty(1, 2)).startswith("packed")
    assert selected("reference").matrices["vocabulary"].linear is linear


def test_flags_that_mix_layouts_are_refused():
    with pytest.raises(
        UserError, match="--functions pack_weight=reference,linear=packed: these functions share packed weights"
    ):
        packing_registry().select(CPU, torch.float32, {"linear": "packed", "pack_weight": "reference"})


def test_functions_nobody_knows_are_refused():
    with pytest.raises(KeyError, match="unknown function 'relu'"):
        FunctionRegistry().add("relu", Implementation(name="x", call=torch.relu))


@pytest.mark.parametrize(
    ("functions", "quantization", "is_named", "lone", "missing"),
    [
        (("pack_codes", "linear", "embedding"), "int8", False, "pack_codes", "pack_weight"),
        (("pack_codes", "linear", "embedding"), "int8", True, "pack_codes", "pack_weight"),
        (("pack_weight", "embedding"), "int8", True, "pack_weight", "linear"),
        (("linear", "gated_linear"), "none", False, "linear", "pack_weight and embedding"),
        (("pack_weight", "linear"), "int4/32", False, "pack_weight", "embedding"),
        (("gated_linear",), "int8", False, "gated_linear", "pack_weight and linear and embedding"),
        (("experts",), "int4", False, "experts", "make_experts"),
        (("make_experts",), "none", True, "make_experts", "experts"),
    ],
    ids=str,
)
def test_weight_layout_that_lacks_a_function_is_refused(functions, quantization, is_named, lone, missing):
    """A product without its packing, or packed weights that nothing multiplies, can be run only in part."""
    registry = reference_registry()
    registry.plugin = "ideas"
    for function in functions:
        registry.add(function, Implementation(name="own", call=print, quantization=quantization, layout="rows"))
    overrides = dict.fromkeys(functions, "own") if is_named else {}
    with pytest.raises(UserError) as refused:
        registry.select(CPU, torch.float32, overrides, quantization.partition("/")[0])
    assert str(refused.value).startswith(
        f"--plugin ideas: {lone}=own is for the weight layout 'rows', which lacks {missing} for cpu in float32"
    )


def test_weight_layout_that_another_device_lacks_is_used():
    registry = packing_registry()
    registry.add("linear", Implementation(name="card", call=print, devices=("card",), layout="rows"))
    assert registry.select(CPU, torch.float32).matrices["layer"].pack_weight(None) == "packed pack_weight"
