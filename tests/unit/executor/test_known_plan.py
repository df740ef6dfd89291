"""Plans that were found before are used again, as long as they fit."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from random_clusters import make_cluster, make_problem

from labinfer.errors import UserError
from labinfer.executor.known_plan import KnownPlan, find_plan
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
    known = msgspec.json.decode(path.read_bytes(), type=KnownPlan)
    assert known.plan == plan and known.memory == {"a": GIB, "b": GIB}
    first, last = plan.stages
    stages = [msgspec.structs.replace(first, layers=20), msgspec.structs.replace(last, layers=4)]
    other = msgspec.structs.replace(plan, stages=stages)
    path.write_bytes(msgspec.json.encode(KnownPlan(other, known.memory)))
    less = with_memory(problem, GIB * 95 // 100)
    found, _ = find_plan(less, tmp_path)
    assert found.stages == other.stages  # so it was not searched for
    assert found == SavedPlan.make(found.stages_on(less.cluster), less)  # with the room of now
    assert find_plan(with_memory(problem, 2 * GIB), tmp_path)[0].stages == plan.stages
    path.write_bytes(msgspec.json.encode(KnownPlan(msgspec.structs.replace(plan, stages=stages[:1]), known.memory)))
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
    known = msgspec.json.decode(path.read_bytes(), type=KnownPlan)
    path.write_bytes(msgspec.json.encode(KnownPlan(known.plan, {"a": 1 << 20, "b": 1 << 20})))
    with pytest.raises(UserError, match="fits on no layout of a, b"):
        find_plan(with_memory(problem, 1 << 20), tmp_path)
