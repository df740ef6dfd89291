"""Reports of plans: each alternative against what the search says of it, and the command that prints them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from random_clusters import make_cluster, make_costs, make_machine, make_problem

from labinfer.base.errors import UserError
from labinfer.cli.main import main
from labinfer.planner.cluster import Cluster, Machine, MachinePairLink, NetworkLink
from labinfer.planner.objective import Stage
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
    assert " in 1 micro-batch\n" in PlanReport.make(make_problem(make_cluster(1.0, num_layers=24))).describe()


def test_even_split_is_the_layout_of_a_start_without_flags():
    single, pair = make_costs(1.0, 24), make_costs(1.8, 24, tp_size=2)
    wide = Machine(name="a", costs=[pair, single], num_ranks=2)
    slow = Machine(name="b", costs=[make_costs(0.5, 24)])
    even = PlanReport.make(make_problem(Cluster(machines=[wide, slow], default_link=NetworkLink(1e-4, 1e9)))).even
    assert [(stage.machine, stage.costs.tp_size, stage.begin, stage.end) for stage in even.stages] == [
        ("a", 1, 0, 8),
        ("a", 1, 8, 16),
        ("b", 1, 16, 24),
    ]
    only_pairs = Machine(name="a", costs=[pair])
    assert PlanReport.make(make_problem(Cluster(machines=[only_pairs]))).even is None


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_stage_is_busy_for_its_part_of_the_round(objective):
    best = PlanReport.make(make_problem(make_cluster(1.0, 0.5, num_layers=24), objective=objective)).best
    alone = PlanReport.make(make_problem(make_cluster(1.0, num_layers=24), objective=objective)).best
    shares = [best.criterion.busy_share(best.stages, number, best.value) for number in range(len(best.stages))]
    assert all(0 < share <= 1 + 1e-9 for share in shares)
    assert alone.criterion.busy_share(alone.stages, 0, alone.value) == pytest.approx(1.0)


def test_stages_that_wait_for_a_slow_link_are_less_busy():
    stages = [Stage(machine=name, costs=make_costs(), begin=4 * n, end=4 * n + 4) for n, name in enumerate("ab")]
    near, far = (
        judge(make_problem(replace_link(make_cluster(1.0, 1.0), NetworkLink(latency, 1e9))), stages)
        for latency in (1e-4, 1.0)
    )
    busy = [solution.criterion.busy_share(stages, 0, solution.value) for solution in (near, far)]
    assert busy[0] > 0.7 and busy[1] < 0.5


def replace_link(cluster: Cluster, link: NetworkLink) -> Cluster:
    return Cluster(machines=cluster.machines, default_link=link)


def test_choices_that_were_not_looked_at_are_told(monkeypatch):
    monkeypatch.setattr("labinfer.planner.units.MAX_CHOICES", 3)
    both = [
        Machine(name=name, costs=[make_costs(speed), make_costs(2 * speed, tp_size=2)])
        for name, speed in (("a", 1.0), ("b", 0.5))
    ]
    text = PlanReport.make(make_problem(Cluster(machines=both, default_link=NetworkLink(1e-4, 1e9)))).describe()
    assert "sizes and precisions not searched: 1" in text
    monkeypatch.undo()
    text = PlanReport.make(make_problem(Cluster(machines=both, default_link=NetworkLink(1e-4, 1e9)))).describe()
    assert "not searched" not in text


def test_machine_that_is_left_out_is_told_with_what_it_would_cost():
    cluster = make_cluster(1.0, 0.8, 0.05, num_layers=24)
    far = [MachinePairLink(a=name, b="c", link=NetworkLink(0.02, 1e7)) for name in "ab"]
    problem = make_problem(Cluster(machines=cluster.machines, links=far, default_link=cluster.default_link))
    report = PlanReport.make(problem)
    assert report.left_out["c"].value > report.best.value
    assert "c is not used; with it:" in report.describe()


def test_replicas_are_told_where_they_would_do_more():
    cluster = make_cluster(1.0, 1.0, num_layers=24)
    slow = Cluster(machines=cluster.machines, default_link=NetworkLink(0.1, 1e6))
    assert "separate servers on a, b" in PlanReport.make(make_problem(slow)).describe()


def test_layout_that_was_chosen_is_judged_as_the_search_did():
    problem = make_problem(make_cluster(1.0, 0.5, 0.25, num_layers=24))
    best = find_layout(problem)
    assert judge(problem, best.stages).value == pytest.approx(best.value)


def test_model_that_does_not_fit_is_refused_in_one_line():
    with pytest.raises(UserError, match="fits no layout of a, b") as error:
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
    assert "predicted:" in text and f"start with --layout {save}, or with -tp" in text.splitlines()[-1]
    plan = msgspec.json.decode(save.read_bytes(), type=SavedPlan)
    assert sum(stage.layers for stage in plan.stages) == 24
    assert {stage.machine for stage in plan.stages} == {"a", "b"}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--auto", "--cluster", "a.json", "-tp", "2"], "plan --auto chooses --tensor-parallel-size itself"),
        (["--auto", "--layout", "auto"], "plan --auto chooses --layout itself"),
        (["--auto", "--link", "1gbit,1ms"], "--link needs --cluster"),
        (["--save", "plan.json"], "--save needs --auto"),
        (["--auto", "--cluster", "absent.json"], "cannot read absent.json"),
    ],
)
def test_wrong_flags_of_a_plan_are_refused(flags, text, capfd):
    assert main(["plan", *flags]) == 2
    assert text in capfd.readouterr().err


def test_command_plans_in_precisions_that_were_asked_for(tmp_path, capfd):
    """Of eight layers each machine has room for three; the last line is a start that LABInfer takes."""
    files = []
    for name, memory in (("a", 14), ("b", 13)):
        files.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(Cluster(machines=[make_machine(name, memory)])))
    flags = ["plan", "--auto", "--cluster", ",".join(files), "--link", "1gbit,1ms", "--max-model-len", "64"]
    flags += ["--max-num-seqs", "4"]
    assert main(flags) == 2
    assert "the planner never quantizes on its own; choose with -q" in capfd.readouterr().err
    assert main([*flags, "-q", "none"]) == 2
    assert "the model fits no layout of a, b" in capfd.readouterr().err
    path = tmp_path / "plan.json"
    assert main([*flags, "-q", "none,int8", "--save", str(path)]) == 0
    plan, text = SavedPlan.read(str(path)), capfd.readouterr().out
    assert sorted(stage.quantization for stage in plan.stages) == ["int8", "none"]
    assert f"-q {','.join(stage.quantization for stage in plan.stages)}; rank 0 on {plan.stages[0].machine}" in text
