"""Throughput that a plan predicts, against a simulation of the same layout by the real scheduler."""

from __future__ import annotations

import pytest
from random_clusters import make_cluster, make_problem

from labinfer.base.config import EngineOptions
from labinfer.cli.bench.options import BenchOptions, LoadOptions, ServeOptions
from labinfer.cli.bench.serve import ServeBenchmark
from labinfer.planner.objective import EngineLimits
from labinfer.planner.problem import Solution
from labinfer.planner.search import find_layout
from labinfer.planner.simulator.simulation import cluster_simulation


def simulate(problem, best: Solution, prompt: int, output: int, rounds: int) -> float:
    """Tokens a second of several times as many requests as run at once, all there from the beginning."""
    names = [machine.name for machine in problem.cluster.machines]
    options = EngineOptions.from_flat(
        {
            "layers": tuple(stage.end - stage.begin for stage in best.stages),
            "ranks": tuple(names.index(stage.machine) for stage in best.stages),
            "max_num_seqs": best.criterion.num_seqs,
            "max_inflight": best.criterion.num_batches,
            "max_model_len": problem.limits.max_model_len,
            "memory_utilization": 1.0,
        }
    )
    model = cluster_simulation(problem.cluster, options).make_model(options.cache, options.scheduler)
    count = rounds * best.criterion.num_seqs
    benchmark = ServeBenchmark(
        BenchOptions(input_len=prompt, output_len=output), LoadOptions(num_prompts=count), ServeOptions()
    )
    benchmark.prepare(model)
    return benchmark.run(model, lambda: None).values["output_throughput"]


@pytest.mark.each_value
@pytest.mark.parametrize(("prompt", "output"), [(512, 128), (1500, 60), (64, 256)])
@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.5), (1.0, 0.5, 0.25)])
def test_plan_predicts_the_rate_of_the_scheduler(speeds, prompt, output):
    limits = EngineLimits(max_model_len=2048, max_num_seqs=64)
    problem = make_problem(make_cluster(*speeds, num_layers=24), prompt=prompt, output=output, limits=limits)
    best = find_layout(problem)
    assert output / best.value == pytest.approx(simulate(problem, best, prompt, output, rounds=4), rel=0.15)
