"""Session: the start of every command: the launch environment, the options, and the group once it is joined."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from labinfer.config import EngineOptions
from labinfer.group.rank_group import RankGroup, join_group
from labinfer.group.shared_signals import share_signals
from labinfer.group.signals import SignalGuard
from labinfer.spmd.environment import LaunchEnvironment

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """One run of one command on this rank."""

    environment: LaunchEnvironment
    options: EngineOptions
    signals: SignalGuard
    group: RankGroup | None = None

    def join(self) -> RankGroup:
        """Meet the other ranks and say how the ranks were found."""
        logger.debug("modules are imported")
        self.group = group = join_group(self.environment, self.options.parallel, self.options.runtime)
        share_signals(self.signals, group)
        if group.rank == 0:
            logger.info("%s", self.environment.describe())
            for note in self.environment.notes:
                logger.info("%s", note)
            logger.info("transport %s; %s", group.comm.name, group.threads.describe())
            if self.environment.supervisor is not None:
                self.environment.supervisor.write_nodes([info.node for info in group.everyone])
        return group
