"""Reports of plans: each alternative against what the search says of it, and the command that prints them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from random_clusters import make_cluster, make_problem

from labinfer.cli import main
from labinfer.errors import UserError
from labinfer.planner.cluster import Cluster, Link, PairLink
from labinfer.planner.report import PlanReport
from labinfer.planner.saved_plan import SavedPlan
from labinfer.planner.search import find_layout, judge


def test_report_names_what_each_machine_adds_and_what_others_would_give():
    problem = make_problem(make_cluster(1.0, 0.5, 0.25, num_layers=24))
    report = PlanReport.make(problem)
    assert set(report.without) == {"a", "b", "c"} and not report.left_out
    assert report.without["a"].value > report.without["b"].value > report.without["c"].value > report.best.value
    assert report.even.value > report.best.value
    assert report.alone["a"].value == find_layout(replace(problem, excluded=frozenset("bc"))).value
    text = report.describe()
    for words in ("predicted:", "even split:", "a alone:", "rank 0 on", "--layers"):
        assert words in text


def test_machine_that_is_left_out_is_told_with_what_it_would_cost():
    cluster = make_cluster(1.0, 0.8, 0.05, num_layers=24)
    far = [PairLink(a=name, b="c", link=Link(0.02, 1e7)) for name in "ab"]
    problem = make_problem(Cluster(machines=cluster.machines, links=far, default_link=cluster.default_link))
    report = PlanReport.make(problem)
    assert report.left_out["c"].value > report.best.value
    assert "c is left out; with it:" in report.describe()


def test_replicas_are_told_where_they_would_do_more():
    cluster = make_cluster(1.0, 1.0, num_layers=24)
    slow = Cluster(machines=cluster.machines, default_link=Link(0.1, 1e6))
    assert "a server of its own on each of a, b" in PlanReport.make(make_problem(slow)).describe()


def test_layout_that_was_chosen_is_judged_as_the_search_did():
    problem = make_problem(make_cluster(1.0, 0.5, 0.25, num_layers=24))
    best = find_layout(problem)
    assert judge(problem, best.stages).value == pytest.approx(best.value)


def test_model_that_does_not_fit_is_refused_in_one_line():
    with pytest.raises(UserError, match="fits on no layout of a, b") as error:
        PlanReport.make(make_problem(make_cluster(1.0, 1.0, memory=1 << 20)))
    assert "\n" not in str(error.value)


def test_command_prints_the_plan_and_saves_it(tmp_path, capfd):
    files = []
    for number, machine in enumerate(make_cluster(1.0, 0.5, num_layers=24).machines):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_bytes(msgspec.json.encode(Cluster(machines=[machine])))
    save = tmp_path / "plan.json"
    flags = ["plan", "--auto", "--cluster", ",".join(map(str, files)), "--link", "a:b=1gbit,0.3ms", "--save", str(save)]
    assert main(flags) == 0
    text = capfd.readouterr().out
    assert "predicted:" in text and f"start it with --layout {save}, or with -tp" in text.splitlines()[-1]
    plan = msgspec.json.decode(save.read_bytes(), type=SavedPlan)
    assert sum(stage.layers for stage in plan.stages) == 24
    assert {stage.machine for stage in plan.stages} == {"a", "b"}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--auto", "--cluster", "a.json", "-tp", "2"], "plan --auto chooses --tensor-parallel-size itself"),
        (["--auto", "--layout", "auto"], "plan --auto chooses --layout itself"),
        (["--auto", "--link", "1gbit,1ms"], "--link is for machines of --cluster"),
        (["--save", "plan.json"], "--save is for plan --auto"),
        (["--auto", "--cluster", "absent.json"], "cannot read absent.json"),
    ],
)
def test_wrong_flags_of_a_plan_are_refused(flags, text, capfd):
    assert main(["plan", *flags]) == 2
    assert text in capfd.readouterr().err
