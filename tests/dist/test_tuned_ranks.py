"""Ranks that hold slices of the same layers run the same implementations, whatever each of them measured."""

from __future__ import annotations

import pytest
import torch

from labinfer.base.config import EngineOptions
from labinfer.functions.autotune import Timing
from labinfer.functions.registry import Implementation
from labinfer.launch import tune
from labinfer.launch.find_model import find_model
from labinfer.launch.layout.layout import make_layout
from labinfer.launch.providers import reference_registry

TARGET = "silu_and_mul"


def layout_and_calls(group, directory, **options):
    """With two more implementations of a function, so that there is something to choose on any machine."""
    options = EngineOptions.from_flat({"model": str(directory), "dtype": "bfloat16", **options})
    _, config = find_model(group, options)
    layout = make_layout(options, config, group.everyone)
    place = layout.topology.place(group.rank)
    registry = reference_registry()
    for name in ("first", "second"):
        registry.add(TARGET, Implementation(name=name, call=torch.nn.functional.silu))
    return layout, place, tune.make_rank_calls(layout, place, registry, {})


def made_up(fastest: str, load: float = 1.0) -> dict[str, list[Timing]]:
    seconds = {name: load * (1.0 if name == fastest else 2.0) for name in ("first", "second")}
    return {TARGET: [Timing(name, "plain", [least] * 5, [load * least] * 5) for name, least in seconds.items()]}


def test_one_choice_for_the_ranks_of_a_stage(group, golden, monkeypatch):
    """Not all ranks found the same to be the fastest."""
    mine = ("first", "second")[group.rank % 2]
    monkeypatch.setattr(tune, "time_candidates", lambda calls, candidates: made_up(mine))
    layout, place, calls = layout_and_calls(group, golden[0], tensor_parallel_size=group.size)
    choice = tune.tune(group, layout, place, calls, cache=None, providers=[])
    assert len(set(group.comm.all_gather_bytes(repr(choice).encode()))) == 1
    expected = "first" if group.size == 1 else "second"  # no rank's favourite is good for all: the preferred one
    assert choice[TARGET] == (expected,) * 5


def test_stages_choose_for_themselves(group, golden, monkeypatch):
    if not 1 < group.size <= 4:
        pytest.skip("needs a stage for each rank; the model has 4 layers")
    mine = ("first", "second")[group.rank % 2]
    monkeypatch.setattr(tune, "time_candidates", lambda calls, candidates: made_up(mine))
    layout, place, calls = layout_and_calls(group, golden[0], pipeline_parallel_size=group.size)
    assert tune.tune(group, layout, place, calls, cache=None, providers=[])[TARGET] == (mine,) * 5


def test_what_was_measured_is_remembered_unless_one_rank_has_to_measure(group, golden, monkeypatch, tmp_path):
    measured = []

    def time_candidates(calls, candidates):
        measured.append(1)
        return made_up("first")

    monkeypatch.setattr(tune, "time_candidates", time_candidates)
    layout, place, calls = layout_and_calls(group, golden[0], tensor_parallel_size=group.size)
    cache = tmp_path / str(group.rank)
    choices = [tune.tune(group, layout, place, calls, cache=cache, providers=[]) for _ in range(2)]
    assert len(measured) == 1 and choices[0] == choices[1]
    if group.rank == group.size - 1:
        next(cache.iterdir()).write_bytes(b"{broken")
    assert tune.tune(group, layout, place, calls, cache=cache, providers=[]) == choices[0]
    assert len(measured) == 2


def test_load_on_one_rank_has_all_measure_again(group, golden, monkeypatch, tmp_path):
    """What was measured under load chose the wrong one: the lesser times of both starts choose the right one."""
    measured = []
    start = [made_up("first", load=3.0) if group.rank == 0 else made_up("second"), made_up("second")]

    def time_candidates(calls, candidates):
        measured.append(list(candidates))
        return start[len(measured) - 1]

    monkeypatch.setattr(tune, "time_candidates", time_candidates)
    layout, place, calls = layout_and_calls(group, golden[0], tensor_parallel_size=group.size)
    options = {"cache": tmp_path / str(group.rank), "providers": []}
    choices = [tune.tune(group, layout, place, calls, **options) for _ in range(3)]
    assert measured == [[TARGET]] * 2
    assert [choice[TARGET] for choice in choices] == [("first",) * 5, ("second",) * 5, ("second",) * 5]


def test_times_are_measured_anew_where_that_is_said(group, golden, monkeypatch, tmp_path):
    start = [made_up("first"), made_up("second")]
    monkeypatch.setattr(tune, "time_candidates", lambda calls, candidates: start.pop(0))
    layout, place, calls = layout_and_calls(group, golden[0], tensor_parallel_size=group.size)
    options = {"cache": tmp_path / str(group.rank), "providers": []}
    choices = [tune.tune(group, layout, place, calls, anew=anew, **options)[TARGET] for anew in (False, True, False)]
    assert choices == [("first",) * 5, ("second",) * 5, ("second",) * 5]


def test_float32_is_never_tuned(group, golden, monkeypatch):
    monkeypatch.setattr(tune, "time_candidates", lambda calls, candidates: pytest.fail("it was measured"))
    layout, place, calls = layout_and_calls(group, golden[0], dtype="float32", tensor_parallel_size=group.size)
    assert tune.tune(group, layout, place, calls, cache=None, providers=[]) == {}
