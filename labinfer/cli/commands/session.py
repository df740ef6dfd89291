"""Session: the start of every command: the launch environment, the options, and the group once it is joined."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.plugins import PLUGINS
from labinfer.comm.group.rank_group import RankGroup, join_group
from labinfer.comm.group.shared_signals import share_signals
from labinfer.comm.group.signals import SignalGuard
from labinfer.comm.spmd.environment import LaunchEnvironment
from labinfer.comm.spmd.machine import numa_node
from labinfer.comm.spmd.threads import advice_on_memory
from labinfer.observe.progress_line import Ticker

if TYPE_CHECKING:
    from labinfer.planner.cluster import MachinePairLink

logger = logging.getLogger(__name__)


Command = Callable[..., int]
"""The function of a command of the command line: ``run(session, **own)``, called on every rank. Returns the exit status.

A plugin registers one with ``@register("command", NAME, help=TEXT, options=SECTIONS)``. ``SECTIONS`` are dataclasses of options:
those of ``labinfer.base.config.SECTIONS`` give the engine its flags, and of each other one ``own["options"]`` has an object, in order; each
field is made by ``option_fields.option``. If there are no other ones, only the session is given. Contract:

- Every rank calls ``session.join()`` first, or none does.
- What only one rank can refuse is raised as ``UserError`` inside ``with session.group.raise_on_all_ranks():``, on every rank alike.
- Output for people goes through ``logging``, results to standard output on rank 0.
"""


@dataclass(kw_only=True)
class Session:
    """One run of one command on this rank."""

    environment: LaunchEnvironment
    options: EngineOptions
    signals: SignalGuard
    starting: Ticker | None = None
    """Rank 0's line, up to when the ranks have met."""
    refusal: UserError | None = None
    """Error that rank 0 has found and said before the ranks met; all end with it when they have."""
    group: RankGroup | None = None
    """The ranks, once they have met: before the command runs if ``--plugin`` is given, else in ``join``."""
    plan_text: str = ""
    """The plan that was made for this start, as a table beside its alternatives; on rank 0, where it was asked for."""
    links: Sequence[MachinePairLink] = ()
    """Links between machines that it was made of."""

    def join(self, explains: bool = False) -> RankGroup:
        """Meet the other ranks, say how the ranks were found, and follow ``--layout``, after which the options have its parts.

        Args:
            explains: whether to keep a table of the plan, too.

        Raises:
            CollectiveError: rank 0 has refused, or the layout is none for these ranks; on every rank.
            UserError: as ``join_group``.
        """
        logger.debug("modules are imported")
        if self.starting is not None and self.environment.world_size > 1 and self.refusal is None:
            self.starting.describe = lambda: "starting: meeting the other ranks"
        try:
            group = self.group or join_group(self.environment, self.options)
            if self.group is not None:  # it met to load plugins, before it had these options
                group.take_cores(self.options.working_ranks, self.options.runtime.threads)
            self.group = group
        finally:
            if self.starting is not None:
                self.starting.close()
        share_signals(self.signals, group)
        with group.raise_on_all_ranks():
            if self.refusal is not None:
                raise self.refusal
        if group.rank == 0:
            logger.info("%s", self.environment.describe())
            for note in self.environment.notes:
                logger.info("%s", note)
            logger.info("transport %s; %s", group.comm.name, group.threads.describe())
            if plugins := PLUGINS.identities():
                logger.info("plugins: %s", ", ".join(plugins))
            advice = advice_on_memory(map(numa_node, os.sched_getaffinity(0)), group.size)
            if advice and not group.everyone[0].accelerator:
                logger.warning("%s", advice)
            if self.environment.supervisor is not None:
                self.environment.supervisor.write_nodes([info.node for info in group.everyone])
        if self.options.parallel.layout:
            from labinfer.cli.commands.measuring import measuring
            from labinfer.launch.choose_layout import choose_layout

            with measuring(group) as on_progress:
                self.options = choose_layout(group, self.options, on_progress, self._keep_report if explains else None)
        return group

    def _keep_report(self, text: str, links: Sequence[MachinePairLink]) -> None:
        self.plan_text, self.links = text, links
