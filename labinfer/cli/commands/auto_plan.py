"""``launch.py plan --auto``: the best layout for machines probed earlier (they need not be running), or for the machines of this
launch."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from labinfer.base.config import PLANNED, EngineOptions
from labinfer.base.errors import ExitStatus, UserError
from labinfer.base.option_fields import flag_name
from labinfer.observe.output_file import STANDARD, OutputFile
from labinfer.planner.cluster import Cluster
from labinfer.planner.make_problem import make_problem, refuse_draft_rank, refuse_drafters
from labinfer.planner.options import PlanOptions
from labinfer.planner.problem import Problem
from labinfer.planner.report import PlanReport

if TYPE_CHECKING:
    from labinfer.cli.commands.session import Session


def run(options: EngineOptions, own: PlanOptions) -> int:
    """Find the best layout for the machines in the file of --cluster, print a report, and write ``--save``. Returns the
    exit status.

    Raises:
        UserError: a file cannot be read or written, or the model does not fit.
    """
    refuse_drafters(options)
    cluster = Cluster.read(own.cluster, own.link)
    problem = make_problem(cluster, options, objective=own.objective, workload=own.workload)
    _report(problem, own, _open_save(own))
    return ExitStatus.OK


def run_here(session: Session, own: PlanOptions) -> int:
    """Probe the machines of this launch, then plan for them as ``run`` does for probed machines. Collective.

    Raises:
        CollectiveError: an error of ``run``, or a machine cannot be probed; raised on every rank.
    """
    from labinfer.cli.commands.measuring import measuring
    from labinfer.launch.find_model import find_model
    from labinfer.launch.measure.probe import probe_cluster
    from labinfer.launch.measure.probe_layout import name_machines

    group, options, file = session.join(), session.options, None
    with group.raise_on_all_ranks():
        refuse_draft_rank(options, "plan --auto")
        if group.rank == 0:
            file = _open_save(own)
    directory, config = find_model(group, options)
    with measuring(group) as on_progress:
        cluster = probe_cluster(group, options, on_progress, for_plan=True)
    with group.raise_on_all_ranks():
        if group.rank == 0:
            count_tokens = None
            if own.workload:
                from labinfer.cli.commands.prompt_lengths import PromptLengths

                count_tokens = PromptLengths(directory)
            problem = make_problem(
                cluster,
                options,
                objective=own.objective,
                workload=own.workload,
                first=name_machines(options, group.everyone)[0][0],
                max_position=config.exact_context or config.max_position,
                count_tokens=count_tokens,
            )
            _report(problem, own, file)
    group.close()
    return ExitStatus.OK


def check_flags(own: PlanOptions, given: Collection[str]) -> None:
    """Check that the flags are consistent.

    Args:
        given: engine options that the user has set.

    Raises:
        UserError: a flag that needs ``--auto`` is given without it, or a flag that ``--auto`` chooses itself is given with it.
    """
    if not own.auto:
        for name in ("cluster", "link", "objective", "workload", "save"):
            if getattr(own, name) != getattr(PlanOptions, name):
                raise UserError(f"--{name} needs --auto; add --auto, or leave it out")
        return
    for name in (*PLANNED, "layout"):
        if name in given:
            raise UserError(f"plan --auto chooses {flag_name(name)} itself; leave one of the two out")
    if own.link and not own.cluster:
        raise UserError("--link needs --cluster (a launch measures its own links); leave it out")


def _open_save(own: PlanOptions) -> OutputFile | None:
    sources = {"--workload": own.workload} | {f"--cluster {path}": path for path in own.cluster}
    return OutputFile(own.save, "--save", sources) if own.save else None


def _report(problem: Problem, own: PlanOptions, file: OutputFile | None) -> None:
    report = PlanReport.make(problem)
    OutputFile(STANDARD).write(report.describe(own.save) + "\n")
    if file is not None:
        file.begin()
        file.write(report.save().decode())
        file.close()
