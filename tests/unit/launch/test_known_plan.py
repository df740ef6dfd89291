"""Plans that were found before are used again, as long as they fit."""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec
import pytest
from random_clusters import make_cluster, make_problem

from labinfer.base.errors import UserError
from labinfer.launch.known_plan import KnownPlan, find_plan
from labinfer.launch.measure.cost_file import read_costs, write_costs
from labinfer.planner.problem import Problem
from labinfer.planner.report import PlanReport
from labinfer.planner.saved_plan import SavedPlan

GIB = 1 << 30


def with_memory(problem: Problem, num_bytes: int) -> Problem:
    machines = [
        msgspec.structs.replace(each, costs=[msgspec.structs.replace(costs, memory=num_bytes) for costs in each.costs])
        for each in problem.cluster.machines
    ]
    return replace(problem, cluster=msgspec.structs.replace(problem.cluster, machines=machines))


def test_plan_is_found_once(tmp_path):
    problem = make_problem(make_cluster(1.0, 0.5, num_layers=24, memory=GIB))
    plan, text = find_plan(problem, tmp_path)
    assert len(plan.stages) == 2 and find_plan(problem, None) == (plan, text) and not text
    (path,) = tmp_path.iterdir()
    known = read_costs(path, KnownPlan)
    assert known.plan == plan and known.memory == {"a": GIB, "b": GIB}
    first, last = plan.stages
    stages = [msgspec.structs.replace(first, layers=20), msgspec.structs.replace(last, layers=4)]
    other = msgspec.structs.replace(plan, stages=stages)
    write_costs(path, KnownPlan(other, known.memory))
    less = with_memory(problem, GIB * 95 // 100)
    found, _ = find_plan(less, tmp_path)
    assert found.stages == other.stages  # so it was not searched for
    assert found == SavedPlan.make(found.stages_on(less.cluster), less)  # with the room of now
    assert find_plan(with_memory(problem, 2 * GIB), tmp_path)[0].stages == plan.stages
    write_costs(path, KnownPlan(msgspec.structs.replace(plan, stages=stages[:1]), known.memory))
    assert find_plan(problem, tmp_path) == (plan, "")
    path.write_bytes(b"{")
    assert find_plan(problem, tmp_path) == (plan, "")
    _, text = find_plan(problem, tmp_path, explains=True)
    assert text == PlanReport.make(problem).describe() and find_plan(problem, tmp_path, explains=True) == (plan, text)
    find_plan(replace(problem, objective="latency"), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_known_plan_tells_the_room_of_now(tmp_path):
    problem = make_problem(make_cluster(1.0, 0.5, num_layers=24, memory=GIB))
    problem = replace(problem, limits=replace(problem.limits, max_num_seqs=1024))
    counts = []
    for num_bytes in (GIB, GIB * 105 // 100):
        plan, text = find_plan(with_memory(problem, num_bytes), tmp_path, explains=True)
        assert f"KV tokens: {plan.num_tokens}\n" in text and "even split:" in text
        counts.append(plan.num_tokens)
    assert counts[0] < counts[1] and len(list(tmp_path.iterdir())) == 1


def test_plan_without_room_is_not_used_again(tmp_path):
    problem = make_problem(make_cluster(1.0, 0.5, num_layers=24, memory=GIB))
    find_plan(problem, tmp_path)
    (path,) = tmp_path.iterdir()
    known = read_costs(path, KnownPlan)
    write_costs(path, KnownPlan(known.plan, {"a": 1 << 20, "b": 1 << 20}))
    with pytest.raises(UserError, match="fits no layout of a, b"):
        find_plan(with_memory(problem, 1 << 20), tmp_path)


def test_plan_of_another_problem_under_the_name_that_is_asked_for_is_searched_for_again(tmp_path, caplog):
    problem = make_problem(make_cluster(1.0, 0.5, num_layers=24, memory=GIB))
    other = make_problem(make_cluster(0.5, 1.0, num_layers=24, memory=GIB))
    (expected, _), (others, _) = find_plan(problem, None), find_plan(other, None)
    assert expected != others
    find_plan(problem, tmp_path)
    (path,) = tmp_path.iterdir()
    find_plan(other, tmp_path)
    (neighbour,) = set(tmp_path.iterdir()) - {path}
    neighbour.replace(path)
    assert find_plan(problem, tmp_path)[0] == expected
    (line,) = caplog.messages
    assert f"{path} is ignored (it was written as {neighbour.name})" in line
    path.unlink()
    os.mkfifo(path)
    assert find_plan(problem, tmp_path)[0] == expected and path.is_file()
