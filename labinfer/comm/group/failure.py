"""Failure of a group: all ranks end quickly, one of them prints the reason, and the exit status is not 0."""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import TracebackType

from labinfer.base.errors import (
    BrokenConnection,
    CollectiveError,
    ExitStatus,
    FilesChanged,
    Interrupted,
    PeerLost,
    UserError,
    WaitTimeout,
)
from labinfer.base.standard_error import write_lines
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.spmd.address_space import explain_by_limit

REASON_SECONDS = 3.0
"""Seconds for which a rank that lost a peer waits for the health channel to report the reason."""


def describe_failure(error: BaseException) -> str:
    """Text of an error for the user: one line if the user can act on it, the traceback for a bug."""
    if isinstance(error, (UserError, WaitTimeout, PeerLost, BrokenConnection, FilesChanged)):
        return f"labinfer: error: {error}"
    if text := explain_by_limit(error):
        return f"labinfer: error: {text}"
    return "".join(traceback.format_exception(error))


def leave_agreed(error: CollectiveError, group: RankGroup, is_said: bool = False) -> None:
    """Shut down all ranks after a CollectiveError, which every rank raised. Rank 0 prints the error unless it has been printed (``is_said``)."""
    if group.rank == 0 and not is_said:
        write_lines(describe_failure(error))
    group.close()


def end_process_with(error: BaseException, group: RankGroup | None, speaks: bool = True) -> None:
    """Exit this process, and with it the group, after an error that only this rank knows of. Does not return.

    Args:
        speaks: whether to print a UserError. Before the ranks have met, only one rank of each node prints it.
    """
    status = ExitStatus.USAGE if isinstance(error, UserError) else ExitStatus.INTERNAL
    if isinstance(error, Interrupted):
        status = 128 + error.signum
    try:
        if not isinstance(error, Interrupted):
            _tell(error, group, speaks)
    finally:
        os._exit(status)


def _tell(error: BaseException, group: RankGroup | None, speaks: bool) -> None:
    if isinstance(error, PeerLost):
        time.sleep(REASON_SECONDS)  # the health channel's thread ends the process as soon as it learns the reason
    if speaks or not isinstance(error, UserError):
        write_lines(describe_failure(error))
    if group is None or group.health_channel is None:
        return
    timed_out = isinstance(error, WaitTimeout)
    if timed_out and group.rank == 0:
        write_lines("\n".join(group.health_channel.ask_states()))
    group.fail(
        f"labinfer: {group.progress.label} on {group.environment.node_name} failed; aborting all ranks", timed_out
    )
    if timed_out and group.rank != 0:
        time.sleep(REASON_SECONDS)  # rank 0 asks all ranks for their states, including this one


def end_group_on_uncaught(group: RankGroup) -> None:
    """Let an uncaught exception of the main thread end every rank, for scripts that use ``LLM`` under a launcher."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, CollectiveError):
            leave_agreed(error, group)
        else:
            end_process_with(error, group)

    if group.size > 1:
        sys.excepthook = hook
