"""How a group ends when something goes wrong: whole, fast, with one account of why, and a status other than 0."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType

from labinfer.errors import AgreedError, ExitStatus, Interrupted, PeerLost, UserError, WaitTimeout
from labinfer.executor.group import RankGroup

GRACE_SECONDS = 5.0
"""From SIGINT or SIGTERM to the end of a process whose main thread does not get around to it."""
NEWS_SECONDS = 3.0
"""How long a rank that lost a peer waits for the lifeline to bring the reason."""
PR_SET_PDEATHSIG = 1


def describe_failure(error: BaseException) -> str:
    """What to print for an error: one line for what the user can act on, the traceback for a defect."""
    if isinstance(error, (UserError, WaitTimeout, PeerLost)):
        return f"labinfer: error: {error}"
    return "".join(traceback.format_exception(error))


def print_whole(text: str) -> None:
    """To standard error in one write, so that the lines of several ranks do not mix."""
    sys.stderr.flush()
    os.write(sys.stderr.fileno(), (text.rstrip("\n") + "\n").encode())


def leave_agreed(error: AgreedError, group: RankGroup) -> None:
    """Every rank has the same refusal: rank 0 says it, and all leave in an orderly way."""
    if group.rank == 0:
        print_whole(describe_failure(error))
    group.close()


def end_process_with(error: BaseException, group: RankGroup | None, speaks: bool = True) -> None:
    """End this process, and with it the group, because of an error that only this rank knows of. Does not return.

    Args:
        speaks: whether a user's error is printed here; before the ranks have met, one rank of a node is enough.
    """
    if isinstance(error, Interrupted):
        os._exit(128 + error.signum)
    if isinstance(error, PeerLost):
        time.sleep(NEWS_SECONDS)  # the lifeline thread ends the process as soon as it knows more
    sys.stdout.flush()
    if speaks or not isinstance(error, UserError):
        print_whole(describe_failure(error))
    if group is not None and group.lifeline is not None:
        timed_out = isinstance(error, WaitTimeout)
        if timed_out and group.rank == 0:
            print_whole("\n".join(group.lifeline.ask_states()))
        group.fail(
            f"labinfer: {group.progress.label} on {group.environment.node_name} failed; ending all ranks", timed_out
        )
        if timed_out and group.rank != 0:
            time.sleep(NEWS_SECONDS)  # rank 0 asks every rank what it is doing, this one too
    os._exit(ExitStatus.USAGE if isinstance(error, UserError) else ExitStatus.INTERNAL)


def end_group_on_uncaught(group: RankGroup) -> None:
    """Make an uncaught exception of the main thread end every rank, for scripts that use ``LLM`` under a launcher."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, AgreedError):
            leave_agreed(error, group)
        else:
            end_process_with(error, group)

    if group.size > 1:
        sys.excepthook = hook


class SignalGuard:
    """SIGINT and SIGTERM ask for an orderly end; where none comes in time, the process ends all the same.

    Handlers only take note: rank 0's main loop calls ``check`` between steps. A thread watches the clock, because the
    main thread may be inside a transport's library, where Python's handlers do not run.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._take_note)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def check(self) -> None:
        """Raises:
        Interrupted: a signal came.
        """
        if self.signum:
            raise Interrupted(self.signum)

    def _take_note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum

    def _watch(self) -> None:
        signum = 0
        while signum not in (signal.SIGINT, signal.SIGTERM):
            signum = os.read(self._read_fd, 1)[0]
        time.sleep(GRACE_SECONDS)
        os._exit(128 + signum)


def die_with_parent() -> None:
    """Get SIGTERM when the launcher's process on this node dies, however it dies (Linux, ``prctl(2)``)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
