"""ElasticRestart: makes the command that restarts a group of ranks after a failure, on the machines that still answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from labinfer.base.clock import Clock
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.server.supervisor.launch_command import LaunchCommand
from labinfer.server.supervisor.reachable_hosts import reachable_hosts
from labinfer.server.supervisor.smaller_layout import smaller_layout

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Seconds within which a machine must answer a call, which runs a short command on it."""
CALL_INTERVAL_SECONDS = 1.0
"""Minimum seconds between two calls of a machine, as some machines refuse the connection at once."""


class ElasticRestart:
    """Chooses the machines on which a group of ranks restarts. Waits for machines that do not answer, and continues without them
    after ``timeout``. If the launcher's command names no machines, or only one, the command is started again unchanged.

    Args:
        command: the command that restarts the group on all machines.
        again: the words of ``command``, to restart on all machines.
        options: options of the ranks.
        read_nodes: returns the node name of each rank of the last group, which rank 0 has written; empty before the
            first group has formed.
        timeout: seconds to wait for a missing machine.
        signum: returns the number of the signal that has requested the end; 0 if none has.
    """

    def __init__(
        self,
        command: LaunchCommand,
        again: list[str],
        options: EngineOptions,
        *,
        read_nodes: Callable[[], list[str]],
        timeout: float,
        signum: Callable[[], int],
        clock: Clock,
    ):
        self._command, self._again, self._options = command, again, options
        self._read_nodes, self._timeout, self._signum, self._clock = read_nodes, timeout, signum, clock
        self._nodes: list[str] = []  # node of each rank of the group with all machines
        self._given_up: list[str] = []  # hosts that did not answer within the timeout

    @property
    def is_smaller(self) -> bool:
        """Whether the group runs without some of its machines."""
        return bool(self._given_up)

    def next_command(self) -> list[str]:
        """Call the machines, and return the command that restarts the group. May wait for ``timeout`` seconds.

        Raises:
            UserError: the group cannot run on the remaining machines.
        """
        if len(self._command.hosts) < 2:
            return self._again
        self._nodes, begin = self._nodes or self._read_nodes(), self._clock()
        answers = self._call(self._command.hosts, ANSWER_SECONDS)
        if self._awaited(answers):
            answers = self._wait_for_others(answers, begin)
        if self._signum():
            return self._again
        if returned := [host for host in self._given_up if host in answers]:
            logger.warning("%s answers again and rejoins the group", " and ".join(returned))
        self._given_up = self._away(answers)
        return self._go_on_without(answers) if self._given_up else self._again

    def _away(self, answers: dict[str, str]) -> list[str]:
        """Names of the machines that do not answer, where ``answers`` maps machines to node names; empty if every node
        of the group answers."""
        if self._nodes and set(self._nodes) <= set(answers.values()):
            return []
        return [host for host in self._command.hosts if host not in answers]

    def _awaited(self, answers: dict[str, str]) -> list[str]:
        """Names of the machines that do not answer and without which the group has not run yet. Only these are waited for."""
        return [host for host in self._away(answers) if host not in self._given_up]

    def _wait_for_others(self, answers: dict[str, str], begin: float) -> dict[str, str]:
        """Call the missing machines until all answer, or until ``timeout`` has passed since ``begin``. Returns the node name of
        each machine that has answered, also before."""
        logger.warning(
            "no answer from %s; waiting up to %g s (--rejoin-timeout) before restarting without it",
            " and ".join(self._awaited(answers)),
            self._timeout,
        )
        while self._awaited(answers) and not self._signum():
            called = self._clock()
            left = begin + self._timeout - called
            if left <= 0:
                break
            back = self._call(self._away(answers), min(ANSWER_SECONDS, max(left, CALL_INTERVAL_SECONDS)))
            answers = answers | back
            if back:
                logger.warning("%s answers again after %.0f s", " and ".join(back), self._clock() - begin)
            else:
                self._clock.sleep(max(0.0, called + CALL_INTERVAL_SECONDS - self._clock()))
        return answers

    def _go_on_without(self, answers: dict[str, str]) -> list[str]:
        names = " and ".join(self._given_up)
        if not self._nodes:
            raise UserError(
                f"no answer from {names}, and the ranks never connected; check that the launcher can start ranks there"
            )
        left = [rank for rank, node in enumerate(self._nodes) if node in answers.values()]
        try:
            flags = smaller_layout(self._options, self._nodes, left)
        except UserError as error:
            raise UserError(f"the group cannot restart without {names}: {error}") from None
        layout = " ".join(flags) or f"--layout {self._options.parallel.layout}"
        logger.warning("restarting without %s: %d of %d ranks, with %s", names, len(left), len(self._nodes), layout)
        return self._command.start(list(answers), len(left)) + flags

    def _call(self, hosts: Sequence[str], seconds: float) -> dict[str, str]:
        return reachable_hosts(self._command, hosts, seconds, lambda: bool(self._signum()))
