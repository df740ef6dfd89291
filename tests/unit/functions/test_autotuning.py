"""Choosing implementations: from made-up times, from a file, and by really measuring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_clock import FakeClock
from model_calls import SETTING, all_calls, layer_calls, rank_calls, registry_with_rival

from labinfer.functions.autotune import (
    MAX_SPREAD,
    MAX_STARTS,
    Timing,
    benchmark,
    choose,
    describe,
    file_name,
    is_disturbed,
    is_tuned,
    merge,
    read_times,
    time_candidates,
    write_times,
)
from labinfer.functions.rank_calls import RankCalls


def made_up(**seconds: list[float]) -> dict[str, list[Timing]]:
    """Of ``linear``; ``plain_…`` are of a layout of their own, and the last is preferred."""
    timings = [Timing(name, name.partition("_")[0], times, times) for name, times in seconds.items()]
    return {"layer.linear": timings}


def chosen(*ranks) -> tuple[str, ...]:
    return choose(ranks)["layer.linear"]


# Choosing.


def test_each_class_of_rows_has_its_fastest():
    times = made_up(panels_a=[2, 1, 1, 3, 1], panels_b=[1, 2, 1, 1, 3])
    assert chosen(times) == ("panels_b", "panels_a", "panels_b", "panels_b", "panels_a")


def test_the_preferred_one_is_only_left_for_what_is_clearly_faster():
    assert chosen(made_up(panels_a=[0.97] * 5, panels_b=[1] * 5)) == ("panels_b",) * 5
    assert chosen(made_up(panels_a=[0.93] * 5, panels_b=[1] * 5)) == ("panels_a",) * 5
    assert chosen(made_up(plain_a=[0.93] * 5, panels_b=[1] * 5)) == ("panels_b",) * 5
    assert chosen(made_up(plain_a=[0.85] * 5, panels_b=[1] * 5)) == ("plain_a",) * 5


def test_implementations_of_different_layouts_do_not_take_turns():
    """The weights are packed once: the layout with the smaller mean has all classes."""
    times = made_up(plain=[1, 1, 1, 1, 6], panels_a=[2, 2, 2, 2, 1], panels_b=[2, 2, 2, 2, 2])
    assert chosen(times) == ("plain",) * 5  # half as long four times, six times as long once
    times = made_up(plain=[1, 1, 1, 1, 100], panels_a=[2, 2, 2, 2, 1], panels_b=[2, 2, 2, 2, 2])
    assert chosen(times) == ("panels_b",) * 4 + ("panels_a",)


def test_ranks_choose_the_same_by_the_slowest():
    mine = made_up(panels_a=[1] * 5, panels_b=[2] * 5)
    other = made_up(panels_a=[5] * 5, panels_b=[1] * 5)
    assert chosen(mine) == ("panels_a",) * 5
    assert chosen(mine, other) == chosen(other, mine) == ("panels_b",) * 5


def test_only_what_all_ranks_have_is_chosen():
    mine = made_up(panels_a=[1] * 5, panels_b=[2] * 5, panels_c=[0.1] * 5)
    assert chosen(mine, made_up(panels_a=[1] * 5, panels_b=[9] * 5)) == ("panels_a",) * 5
    assert choose([mine, {}]) == {}


def test_the_choice_can_be_said_in_a_line():
    names = ("cpu-dot", "cpu-dot", "cpu", "cpu", "cpu-dot")
    text = describe({"layer.linear": names, "silu_and_mul": ("cpu",) * 5})
    assert text == "linear cpu-dot, from 9 rows cpu, from 129 rows cpu-dot; silu_and_mul cpu"


@pytest.mark.parametrize(("dtype", "tuned"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)])
def test_only_16_bit_models_are_tuned(dtype, tuned):
    assert is_tuned(dtype) == tuned


# Measuring.


class Clock(FakeClock):
    """Time that passes when something is called."""

    def __init__(self):
        super().__init__(0.0)
        self.calls: list[str] = []

    def taking(self, name: str, *seconds: float):
        """The first calls take so long, and all that follow as long as the last."""

        def call():
            count = self.calls.count(name)
            self.calls.append(name)
            self.now += seconds[min(count, len(seconds) - 1)]

        return call


def test_calls_take_turns_and_the_least_time_counts():
    clock = Clock()
    calls = {"a": clock.taking("a", 9, 3, 3, 2, 4), "b": clock.taking("b", 2, 3)}
    assert benchmark(calls, lambda: None, 16, clock=clock) == {"a": [9, 3, 3, 2, 4], "b": [2, 3, 3, 3, 3]}
    assert clock.calls == ["a", "b"] * 5


@pytest.mark.parametrize(("interrupted", "rounds"), [(40, 10), (120, 3)])
def test_an_interrupted_call_is_repeated_but_not_for_ever(interrupted, rounds):
    clock = Clock()
    calls = {"a": clock.taking("a", interrupted, interrupted, 1), "b": clock.taking("b", 1)}
    samples = benchmark(calls, lambda: None, 19, clock=clock)
    assert {name: min(seconds) for name, seconds in samples.items()} == {"a": 1, "b": 1}
    assert clock.calls == ["a", "b"] * rounds


def test_the_hopeless_drop_out_after_the_warm_up():
    clock = Clock()
    calls = {
        "slow": clock.taking("slow", 5),
        "warming": clock.taking("warming", 60, 1),
        "fast": clock.taking("fast", 1),
    }
    samples = benchmark(calls, lambda: None, 20, clock=clock)
    assert {name: min(seconds) for name, seconds in samples.items()} == {"slow": 5, "warming": 1, "fast": 1}
    assert clock.calls.count("slow") == 3
    assert clock.calls.count("warming") > 5


def test_slower_implementation_is_found_out():
    counts = {call: count for call, count in all_calls().items() if call.target != "latent_attention"}
    calls = rank_calls(registry_with_rival(), counts)
    assert set(calls.contested()) == {"layer.linear", "vocabulary.linear"}
    assert choose([time_candidates(calls, calls.contested())]) == {
        "layer.linear": ("reference",) * 5,
        "vocabulary.linear": ("reference",) * 5,
    }


# Remembering.


@pytest.fixture
def calls() -> RankCalls:
    return rank_calls(registry_with_rival(), layer_calls())


def timing(name: str, seconds: list[float], medians: list[float] | None = None, starts: int = 1) -> Timing:
    return Timing(name, "plain", seconds, medians or seconds, starts)


TIMES = {"layer.linear": [timing("reference", [1.0] * 5), timing("slow", [2.0] * 5, [2.1] * 5)]}


def test_times_are_remembered(calls, tmp_path):
    path = tmp_path / "new" / "times.json"
    assert read_times(path, calls) is None
    write_times(path, TIMES)
    assert read_times(path, calls) == TIMES
    assert [found.name for found in path.parent.iterdir()] == ["times.json"]  # nothing unfinished is left


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"layer.linear": 3}', b'{"layer.linear": [{"name": "reference"}]}', b"{}"],
)
def test_a_broken_file_is_as_good_as_none(calls, tmp_path, content):
    path = tmp_path / "times.json"
    path.write_bytes(content)
    assert read_times(path, calls) is None


@pytest.mark.parametrize(
    "seconds", [[1.0] * 4, [1.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, -1.0, 1.0, 1.0]], ids=["short", "zero", "negative"]
)
def test_times_that_cannot_be_are_measured_again(calls, tmp_path, seconds):
    path = tmp_path / "times.json"
    for bad in (timing("slow", seconds, [2.0] * 5), timing("slow", [2.0] * 5, seconds)):
        write_times(path, {"layer.linear": [TIMES["layer.linear"][0], bad]})
        assert read_times(path, calls) is None


def test_times_of_other_candidates_are_not_taken(calls, tmp_path):
    path = tmp_path / "times.json"
    write_times(path, {"layer.linear": [timing("reference", [1.0] * 5), timing("quick", [2.0] * 5)]})
    assert read_times(path, calls) is None


def test_times_without_medians_are_not_taken(calls, tmp_path):
    path = tmp_path / "times.json"
    path.write_bytes(
        b'{"layer.linear":[{"name":"reference","layout":"plain","seconds":[1,1,1,1,1]},'
        b'{"name":"slow","layout":"plain","seconds":[1,1,1,1,1]}]}'
    )
    assert read_times(path, calls) is None


# Load.


def test_load_is_known_by_the_mean_of_all_times():
    def times(*medians: float) -> dict[str, list[Timing]]:
        return {
            name: [timing("a", [0.5] * 5, [0.5 * spread] * 5)] for name, spread in zip("xyz", medians, strict=False)
        }

    assert not is_disturbed(times(MAX_SPREAD**2.9, 1.0, 1.0))  # such are there on an idle machine, too
    assert is_disturbed(times(MAX_SPREAD**3.1, 1.0, 1.0))
    assert is_disturbed(times(1.01 * MAX_SPREAD, 1.01 * MAX_SPREAD))
    assert not is_disturbed(times(1.0)) and not is_disturbed({})


def test_times_of_a_machine_that_is_never_idle_are_taken_in_the_end():
    busy = {"linear": [timing("a", [1.0] * 5, [9.0] * 5)]}
    times, starts = busy, 1
    while is_disturbed(times):
        times, starts = merge(times, busy), starts + 1
    assert starts == MAX_STARTS


def test_merged_times_are_the_least_of_both_starts():
    first = {"linear": [timing("a", [1.0, 2.0], [4.0, 2.1]), timing("b", [3.0, 3.0])]}
    second = {"linear": [timing("a", [1.1, 1.0], [1.2, 5.0]), timing("b", [4.0, 2.0])]}
    assert merge(first, second) == {
        "linear": [timing("a", [1.0, 1.0], [1.2, 2.1], starts=2), timing("b", [3.0, 2.0], starts=2)]
    }


def test_every_key_has_a_file_of_its_own():
    names = {file_name("1.0", "kernels-1.so", SETTING, 2), file_name("1.0", "kernels-2.so", SETTING, 2)}
    names |= {file_name("1.1", "kernels-1.so", SETTING, 2), file_name("1.0", "kernels-1.so", SETTING, 1)}
    assert len(names) == 4
    assert all(Path(name).suffix == ".json" for name in names)
