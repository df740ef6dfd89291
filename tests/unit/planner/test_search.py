"""The search against all layouts there are, and what it should choose where that is known."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from effort import effort
from hypothesis import HealthCheck, given, settings
from random_clusters import (
    FORMS,
    LAN,
    LIMITS,
    all_layouts,
    fits,
    make_cluster,
    make_costs,
    make_machine,
    make_problem,
    problems,
    problems_of_forms,
    try_all,
    try_all_forms,
)

from labinfer.base.errors import UserError
from labinfer.planner.branch_and_bound import BranchAndBound
from labinfer.planner.cluster import Cluster, Machine, MachinePairLink, NetworkLink
from labinfer.planner.costs import HostCosts, Points
from labinfer.planner.objective import RESERVE, CacheDemand, EngineLimits, Stage, kv_tokens, make_criteria
from labinfer.planner.problem import Problem
from labinfer.planner.search import find_layout, judge


def compare(problem: Problem) -> None:
    """Check that the search comes to the same value as trying everything, with a layout that has it."""
    best, expected = find_layout(problem), try_all(problem)
    assert (best is None) == (expected is None)
    if best is None:
        return
    assert best.value == pytest.approx(expected.value, rel=1e-9)
    assert best.criterion.evaluate(best.stages, problem.cluster) == pytest.approx(best.value, rel=1e-9)
    assert fits(best.stages, problem.limits, CacheDemand(problem.limits.max_model_len, best.criterion.num_seqs))
    assert [stage.begin for stage in best.stages[1:]] == [stage.end for stage in best.stages[:-1]]
    assert problem.first in ("", best.stages[0].machine)
    assert problem.required <= {stage.machine for stage in best.stages}


QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=80, **QUIET)
@given(problems(most_machines=3, most_layers=6))
def test_search_equals_trying_every_layout(problem):
    """The full number, of larger clusters: the next test."""
    compare(problem)


@pytest.mark.slow
@settings(max_examples=2000, **QUIET)
@given(problems())
def test_search_equals_trying_every_layout_of_2000_clusters(problem):
    compare(problem)


NUM_EXAMPLES = pytest.mark.parametrize("num_examples", [40, pytest.param(100, marks=pytest.mark.slow)])


@NUM_EXAMPLES
def test_unlike_layers_are_cut_as_well_as_can_be_in_their_order(num_examples):
    settings(max_examples=num_examples, **QUIET)(
        given(problems(kinds=("dense", "moe"), most_machines=3, most_layers=6))(compare_unlike_layers)
    )()


def compare_unlike_layers(problem: Problem) -> None:
    best = find_layout(problem)
    assert (best is None) == (try_all(problem) is None)
    if best is None:
        return
    room = problem.cache_demand(best.criterion.num_seqs)
    values = [
        best.criterion.evaluate(stages, problem.cluster)
        for stages in all_layouts(problem)
        if [stage.machine for stage in stages] == [stage.machine for stage in best.stages]
        and fits(stages, problem.limits, room)
    ]
    assert best.value == pytest.approx(min(values), rel=1e-9)


def test_unlike_layers_fit_where_mean_ones_would_not():
    layers = ["dense"] * 4 + ["moe"] * 4
    kinds = {"layers": layers, "layer_kinds": dict.fromkeys(layers, make_costs().layer_kinds["dense"])}
    kinds |= {"layer_bytes": {"dense": 10 << 20, "moe": 100 << 20}, "kv_bytes": {"dense": 1 << 10, "moe": 1 << 10}}
    machines = [
        Machine(name=name, costs=[make_costs(memory=memory << 20, **kinds)]) for name, memory in (("a", 420), ("b", 60))
    ]
    problem = make_problem(Cluster(machines=machines, default_link=NetworkLink(1e-4, 1e9)))
    for objective in ("throughput", "latency"):
        best = find_layout(replace(problem, objective=objective))
        assert [(stage.machine, stage.begin, stage.end) for stage in best.stages] == [("b", 0, 4), ("a", 4, 8)]
    assert find_layout(replace(problem, first="a")) is None


@pytest.mark.parametrize("last_cut", [None, 4, 2])
def test_layers_that_share_a_cache_are_not_parted(last_cut):
    layers = ["dense", "moe"] * 4
    kinds = {"layers": layers, "layer_kinds": dict.fromkeys(layers, make_costs().layer_kinds["dense"])}
    kinds |= {"layer_bytes": dict.fromkeys(layers, 1 << 20), "kv_bytes": dict.fromkeys(layers, 1 << 10)}
    costs = make_costs(head=Points([1], [1e-2]), last_cut=last_cut, **kinds)
    machines = [Machine(name=name, costs=[costs]) for name in "ab"]
    best = find_layout(make_problem(Cluster(machines=machines, default_link=NetworkLink(1e-5, 1e10))))
    begins = [stage.begin for stage in best.stages]
    assert begins == [0, last_cut or 5]


def make_stage(costs: HostCosts) -> Stage:
    """All layers on one machine."""
    return Stage(machine="a", costs=costs, begin=0, end=len(costs.layers))


def layers_by_machine(solution) -> dict[str, int]:
    return {stage.machine: stage.end - stage.begin for stage in solution.stages}


def test_layers_follow_speed_in_throughput():
    layers = layers_by_machine(
        find_layout(make_problem(make_cluster(1.0, 0.5, 0.25, num_layers=24, head=Points([1], [0.0]))))
    )
    assert layers == {"a": 14, "b": 7, "c": 3}


def test_answer_alone_is_fastest_on_the_fastest_machine():
    best = find_layout(make_problem(make_cluster(0.5, 1.0, 0.9), objective="latency"))
    assert layers_by_machine(best) == {"b": 8}


def test_slow_machine_behind_a_slow_link_is_left_out():
    cluster = make_cluster(1.0, 0.5, 0.25, 0.05, num_layers=24)
    far = [MachinePairLink(a=name, b="d", link=NetworkLink(0.02, 1e7)) for name in "abc"]
    problem = make_problem(Cluster(machines=cluster.machines, links=far, default_link=cluster.default_link))
    best, forced = find_layout(problem), find_layout(replace(problem, required=frozenset("d")))
    assert "d" not in layers_by_machine(best)
    assert "d" in layers_by_machine(forced) and forced.value > best.value


def test_machine_without_memory_gets_what_it_has_room_for():
    cluster = make_cluster(1.0, 1.0, num_layers=8)
    small = make_costs(num_layers=8, memory=40 << 20)
    cluster = Cluster(
        machines=[cluster.machines[0], Machine(name="b", costs=[small])], default_link=cluster.default_link
    )
    layers = layers_by_machine(find_layout(make_problem(cluster)))
    assert layers["a"] > 4 > layers["b"]


def test_memory_balances_kv_tokens_at_little_cost():
    limits = EngineLimits(max_model_len=4096)
    machines = [
        Machine(name="a", costs=[make_costs(1.0, 24, memory=400 << 20)]),
        Machine(name="b", costs=[make_costs(0.9, 24, memory=200 << 20)]),
    ]
    problem = make_problem(Cluster(machines=machines, default_link=NetworkLink(3e-4, 1.25e8)), limits=limits)
    fastest, roomiest = find_layout(problem), find_layout(replace(problem, objective="memory"))
    assert kv_tokens(roomiest.stages, limits) > kv_tokens(fastest.stages, limits)
    assert roomiest.value <= fastest.value / 0.9
    allowed = [
        kv_tokens(stages, limits)
        for stages in all_layouts(problem)
        if min(
            criterion.evaluate(stages, problem.cluster)
            for criterion in make_criteria("throughput", problem.request, limits, 2)
            if criterion.num_stages[0] <= len(stages) <= criterion.num_stages[1]
            and fits(stages, limits, problem.cache_demand(criterion.num_seqs))
        )
        <= fastest.value / 0.9
    ]
    assert kv_tokens(roomiest.stages, limits) == max(allowed)


def test_layout_has_room_for_the_longest_request():
    limits = EngineLimits(max_model_len=4096, max_num_seqs=4)
    room = int((16 << 20) / (1 - RESERVE)) + 1  # for 2,048 tokens
    costs = make_costs(memory=((8 + 2) << 20) + room)  # layers, both ends, and room
    problem = make_problem(Cluster(machines=[Machine(name="a", costs=[costs])]), prompt=100, output=10, limits=limits)
    assert find_layout(problem) is None and judge(problem, [make_stage(costs)]) is None
    shorter = replace(problem, limits=replace(limits, max_model_len=2048))
    assert judge(shorter, [make_stage(costs)]).value == pytest.approx(find_layout(shorter).value)


def test_layout_that_is_judged_has_states_for_its_sequences():
    costs = make_costs(
        memory=1 << 26, state_bytes={"dense": 1 << 20}
    )  # 54 MiB beside the weights, half of them for states
    limits = EngineLimits(max_model_len=256, max_num_seqs=64)
    problem = make_problem(Cluster(machines=[Machine(name="a", costs=[costs])]), prompt=100, output=10, limits=limits)
    assert judge(problem, [make_stage(costs)]).criterion.num_seqs == find_layout(problem).criterion.num_seqs <= 3


def test_model_that_fits_nowhere_has_no_layout():
    assert find_layout(make_problem(make_cluster(1.0, 1.0, memory=1 << 20))) is None


def test_equal_machines_are_a_class_so_that_many_are_quick():
    cluster = Cluster(
        machines=[Machine(name=f"m{number}", costs=[make_costs(1.0, 80)]) for number in range(64)],
        default_link=NetworkLink(1e-4, 1e9),
    )
    best, yardsticks = effort(lambda: find_layout(make_problem(cluster)))
    assert len(best.stages) > 8 and max(layers_by_machine(best).values()) <= 6
    assert yardsticks < 400  # 12 s on the machine on which it takes 2


def test_ten_unlike_machines_and_80_layers_are_quick():
    rng = random.Random(1)
    machines = [Machine(name=f"m{n}", costs=[make_costs(rng.uniform(0.1, 1.5), 80)]) for n in range(10)]
    links = [
        MachinePairLink(a=a.name, b=b.name, link=NetworkLink(rng.uniform(1e-4, 5e-3), rng.uniform(1e7, 1e9)))
        for a, b in itertools.combinations(machines, 2)
    ]
    best, yardsticks = effort(lambda: find_layout(make_problem(Cluster(machines=machines, links=links))))
    assert len(best.stages) > 4 and yardsticks < 200  # 6 s on the machine on which it takes 0.8


def test_too_many_unlike_machines_are_refused():
    machines = [Machine(name=f"m{number}", costs=[make_costs(1 + number / 100)]) for number in range(15)]
    with pytest.raises(UserError, match="15 machines make 32768 sets of stages"):
        find_layout(make_problem(Cluster(machines=machines, default_link=NetworkLink(1e-4, 1e9))))


def test_tp_size_is_chosen_for_each_machine():
    sums = Points([1, 1 << 20], [1e-5, 1e-3])
    wide = Machine(name="a", costs=[make_costs(0.5), make_costs(1.0, tp_size=2, all_reduce=sums)])
    slow_sums = Points([1], [1.0])
    narrow = Machine(name="b", costs=[make_costs(0.5), make_costs(1.0, tp_size=2, all_reduce=slow_sums)])
    best = find_layout(
        make_problem(Cluster(machines=[wide, narrow], default_link=NetworkLink(1e-4, 1e9)), objective="latency")
    )
    assert [(stage.machine, stage.costs.tp_size) for stage in best.stages] == [("a", 2)]
    best = find_layout(make_problem(Cluster(machines=[wide, narrow], default_link=NetworkLink(1e-4, 1e9))))
    assert {(stage.machine, stage.costs.tp_size) for stage in best.stages} >= {("a", 2), ("b", 1)}


@NUM_EXAMPLES
def test_search_over_forms_equals_trying_all_with_the_fewest_later_ones(num_examples):
    settings(max_examples=num_examples, **QUIET)(given(problems_of_forms())(compare_forms))()


def compare_forms(problem: Problem) -> None:
    best, expected = find_layout(problem), try_all_forms(problem)
    assert (best is None) == (expected is None)
    if best is not None:
        assert best.level == expected.level
        assert best.value == pytest.approx(expected.value, rel=1e-9)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [  # of eight layers, with a KiB of cache for each of 64 tokens a layer
        ((40, 40), {"none"}),
        ((40, 3), {"none"}),  # the model fits on one machine
        ((30, 9), {"none"}),
        ((14, 13), {"none", "int8"}),
        ((30, 3), {"int8"}),  # one machine, too, and it takes all layers
        ((10, 9), {"int8"}),
        ((7, 6), {"int8", "int4"}),
        ((6, 4), {"int4"}),
        ((3, 3), None),
    ],
)
@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_fewer_bits_are_chosen_only_where_the_model_does_not_fit(memory, expected, objective):
    cluster = Cluster(machines=[make_machine("a", memory[0]), make_machine("b", memory[1])], default_link=LAN)
    problem = make_problem(cluster, prompt=30, output=10, limits=LIMITS, dtypes=FORMS, objective=objective)
    best = find_layout(problem)
    assert (best and {stage.costs.quantization for stage in best.stages}) == expected


def test_machine_that_has_only_a_later_form_has_it_from_the_start():
    machines = [make_machine("a", 14), make_machine("b", 13, FORMS[1:])]
    cluster = Cluster(machines=machines, default_link=LAN)
    best = find_layout(make_problem(cluster, prompt=30, output=10, limits=LIMITS, dtypes=FORMS))
    assert {stage.machine: stage.costs.quantization for stage in best.stages} == {"a": "none", "b": "int8"}
    assert best.level == (0, 0)


def test_first_allowed_dtype_that_was_measured_is_taken():
    both = Machine(name="a", costs=[make_costs(1.0, dtype="float32"), make_costs(2.0, dtype="bfloat16")])
    problem = make_problem(Cluster(machines=[both]))
    for dtypes in ((("bfloat16", "none"), ("float32", "none")), (("float32", "none"),)):
        assert find_layout(replace(problem, dtypes=dtypes)).stages[0].costs.dtype == dtypes[0][0]
    assert find_layout(replace(problem, dtypes=(("float16", "none"),))) is None


def test_model_that_fits_nowhere_is_told_without_a_search(monkeypatch):
    """Ten unlike machines have thousands of choices of precisions."""
    monkeypatch.setattr(BranchAndBound, "run", lambda search: pytest.fail("searched"))
    machines = [make_machine(name, 2 + number, num_layers=80) for number, name in enumerate("abcdefghij")]
    problem = make_problem(Cluster(machines=machines, default_link=LAN), dtypes=FORMS)
    assert find_layout(problem) is None
