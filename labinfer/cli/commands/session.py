"""Session: what every command gets: launch environment, engine options and, after ``join``, the group of ranks."""

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
"""Function of a command: ``run(session, **own)``, called on every rank. Returns the exit status.

A plugin registers one with ``@register("command", NAME, help=TEXT, options=SECTIONS)``. ``SECTIONS`` are dataclasses of options,
with fields made by ``option_fields.option``. The engine's sections (``labinfer.base.config.SECTIONS``) only add the engine's flags
to the command. For the command's own sections the function receives ``options=[…]``, one object per section in order; a command
without sections of its own receives only the session. Contract:

- Every rank calls ``session.join()`` first, or none does.
- An error that only one rank can detect is raised as ``UserError`` inside ``with session.group.raise_on_all_ranks():``, which every
  rank enters.
- Messages go through ``logging``, results to standard output on rank 0.
"""


@dataclass(kw_only=True)
class Session:
    """One run of a command on this rank."""

    environment: LaunchEnvironment
    options: EngineOptions
    signals: SignalGuard
    starting: Ticker | None = None
    """Progress line on rank 0 until all ranks have connected; None on other ranks."""
    refusal: UserError | None = None
    """Error that rank 0 found and printed before all ranks had connected. Once they have, the error ends all ranks."""
    group: RankGroup | None = None
    """The group of ranks. With ``--plugin`` it is joined before the command runs, otherwise in ``join``."""
    plan_text: str = ""
    """The plan made for this start by ``--layout auto``, as a table with its alternatives; on rank 0, after
    ``join(explains=True)``."""
    links: Sequence[MachinePairLink] = ()
    """Measured links between machines, by which ``--layout auto`` made the plan."""

    def join(self, explains: bool = False) -> RankGroup:
        """Join the group of all ranks, log launcher and transport, and apply ``--layout`` to the options.

        Args:
            explains: whether to set ``plan_text`` and ``links``.

        Raises:
            CollectiveError: rank 0 has a ``refusal``, or the layout does not match these ranks; raised on every rank.
            UserError: see ``join_group``.
        """
        logger.debug("modules are imported")
        if self.starting is not None and self.environment.world_size > 1 and self.refusal is None:
            self.starting.describe = lambda: "starting: waiting for the other ranks"
        try:
            group = self.group or join_group(self.environment, self.options)
            if self.group is not None:  # the group was joined to load plugins, before these options were parsed
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
        from labinfer.launch.device_defaults import with_device_defaults

        self.options = with_device_defaults(self.options, group.everyone)
        if self.options.parallel.layout:
            from labinfer.cli.commands.measuring import measuring
            from labinfer.launch.choose_layout import choose_layout

            with measuring(group) as on_progress:
                self.options = choose_layout(group, self.options, on_progress, self._keep_report if explains else None)
        return group

    def _keep_report(self, text: str, links: Sequence[MachinePairLink]) -> None:
        self.plan_text, self.links = text, links
