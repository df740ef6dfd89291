"""share_signals: handles a signal to one rank as a signal to the whole group."""

from __future__ import annotations

import logging
import os
import signal
import time

from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.group.signals import SignalGuard

logger = logging.getLogger(__name__)

ALL_SECONDS = 0.3
"""Seconds that a launcher or terminal may take to signal all ranks. A rank without a signal by then ends because of another rank's signal."""


def share_signals(signals: SignalGuard, group: RankGroup) -> None:
    """Let a signal to a single rank end the run as a signal to all ranks does. Rank 0 logs which rank got it, or that its launcher died."""
    health_channel, launcher = group.health_channel, os.getppid()
    if health_channel is None:
        return

    def tell_rank0(signum: int) -> None:
        health_channel.tell_signal(signum)
        if not signals.running:  # else this rank continues until rank 0 ends the run
            time.sleep(
                2 * ALL_SECONDS
            )  # rank 0 logs the signal first: a launcher kills rank 0 as soon as this rank exits

    def tell_followers(signum: int) -> None:
        if os.getppid() != launcher:
            logger.warning("process %d, which started the ranks, is gone; aborting", launcher)
        if not signals.running:  # else rank 0 shuts the run down
            health_channel.tell_signal(signum)

    def end_run(rank: str, signum: int) -> None:
        time.sleep(ALL_SECONDS)
        if not signals.signum:
            logger.warning("%s got %s; aborting", rank, signal.Signals(signum).name)
            signals.take(signum)

    def end_process(rank: str, signum: int) -> None:
        time.sleep(ALL_SECONDS)
        if not signals.signum:
            os._exit(128 + signum)

    signals.tell, health_channel.on_signal = (tell_rank0, end_process) if group.rank else (tell_followers, end_run)
