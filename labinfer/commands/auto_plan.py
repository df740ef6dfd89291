"""``launch.py plan --auto``: the best layout for machines that were probed, which need not be there."""

from __future__ import annotations

from labinfer.config import EngineOptions
from labinfer.errors import ExitStatus, UserError
from labinfer.observe.output_file import STANDARD, OutputFile
from labinfer.planner.cluster import Cluster
from labinfer.planner.objective import Limits
from labinfer.planner.options import PlanOptions
from labinfer.planner.problem import Problem
from labinfer.planner.report import PlanReport
from labinfer.planner.workload import Workload, read_workload

DEFAULT_LENGTH = 4096
"""Tokens of a context where --max-model-len does not say."""


def run(options: EngineOptions, own: PlanOptions) -> int:
    """Plan, print the report, and write ``--save``. Returns the exit status.

    Raises:
        UserError: a file cannot be read or written, or the model does not fit.
    """
    if not own.cluster:
        raise UserError("--auto plans for machines that were probed; add --cluster FILES of launch.py probe --save")
    cluster = Cluster.read(own.cluster, own.link)
    workload = read_workload(own.workload) if own.workload else Workload()
    length = options.model.max_model_len or max(
        DEFAULT_LENGTH, *(request.prompt + request.output for request in workload.requests)
    )
    workload.check(length)
    limits = Limits(
        max_model_len=length,
        max_num_seqs=options.scheduler.max_num_seqs,
        max_num_batched_tokens=options.scheduler.max_num_batched_tokens,
        chunked_prefill_size=options.scheduler.chunked_prefill_size,
        block_size=options.cache.block_size,
        memory_utilization=options.cache.memory_utilization,
    )
    sources = {"--workload": own.workload} | {f"--cluster {path}": path for path in own.cluster}
    file = OutputFile(own.save, "--save", sources) if own.save else None
    problem = Problem(cluster=cluster, request=workload.mean, limits=limits, objective=own.objective)
    report = PlanReport.make(problem)
    OutputFile(STANDARD).write(report.describe() + "\n")
    if file is not None:
        file.begin()
        file.write(report.save().decode())
    return ExitStatus.OK


def check_unused(own: PlanOptions) -> None:
    """Check the flags of a plan that is not to be chosen.

    Raises:
        UserError: one is given that is for ``--auto`` only.
    """
    for name in ("cluster", "link", "workload", "save"):
        if getattr(own, name):
            raise UserError(f"--{name} is for plan --auto; add --auto, or leave it out")
