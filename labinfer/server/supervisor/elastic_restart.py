"""ElasticRestart: the command that restarts a group after a death, on the hosts that are still there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from labinfer.base.clock import Clock
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.server.supervisor.launch_command import LaunchCommand
from labinfer.server.supervisor.probe_hosts import probe_hosts
from labinfer.server.supervisor.smaller_layout import smaller_layout

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""A host may take so long to start something short."""
PROBE_INTERVAL_SECONDS = 1.0
"""Between two probes of hosts that refuse at once."""


class ElasticRestart:
    """Waits for hosts that do not answer, and goes on without them when they stay away. A launcher whose hosts are not known,
    or that has only one, is started again as it was.

    Args:
        command: the command after a death, with all hosts.
        again: the same as words.
        options: of the ranks.
        read_nodes: returns the machine of each rank of the last group whose ranks have met; empty before the first.
        timeout: seconds that a host is waited for.
        signum: the signal that has asked for the end; 0 where none has.
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
        self._nodes: list[str] = []  # of each rank, when all hosts were there
        self._given_up: list[str] = []  # hosts

    @property
    def is_smaller(self) -> bool:
        """Whether the group goes on without some of its hosts."""
        return bool(self._given_up)

    def next_command(self) -> list[str]:
        """The command that starts the group again; it may take a while to find out.

        Raises:
            UserError: those that are left cannot go on.
        """
        if len(self._command.hosts) < 2:
            return self._again
        self._nodes, begin = self._nodes or self._read_nodes(), self._clock()
        answers = self._probe(self._command.hosts, ANSWER_SECONDS)
        if self._awaited(answers):
            answers = self._wait_for_others(answers, begin)
        if self._signum():
            return self._again
        if returned := [host for host in self._given_up if host in answers]:
            logger.warning("an answer from %s again: part of the group from now on", " and ".join(returned))
        self._given_up = self._away(answers)
        return self._go_on_without(answers) if self._given_up else self._again

    def _away(self, answers: dict[str, str]) -> list[str]:
        """Hosts that do not answer, where the group has ranks on any of them."""
        if self._nodes and set(self._nodes) <= set(answers.values()):
            return []
        return [host for host in self._command.hosts if host not in answers]

    def _awaited(self, answers: dict[str, str]) -> list[str]:
        """Hosts that do not answer and are waited for: those that were there until now."""
        return [host for host in self._away(answers) if host not in self._given_up]

    def _wait_for_others(self, answers: dict[str, str], begin: float) -> dict[str, str]:
        """Nodes of the hosts that answer, after all do or the time that began then is up."""
        logger.warning(
            "no answer from %s; waiting up to %g s for it (--rejoin-timeout) before going on without",
            " and ".join(self._awaited(answers)),
            self._timeout,
        )
        while self._awaited(answers) and not self._signum():
            called = self._clock()
            left = begin + self._timeout - called
            if left <= 0:
                break
            back = self._probe(self._away(answers), min(ANSWER_SECONDS, max(left, PROBE_INTERVAL_SECONDS)))
            answers = answers | back
            if back:
                logger.warning("an answer from %s after %.0f s", " and ".join(back), self._clock() - begin)
            else:
                self._clock.sleep(max(0.0, called + PROBE_INTERVAL_SECONDS - self._clock()))
        return answers

    def _go_on_without(self, answers: dict[str, str]) -> list[str]:
        names = " and ".join(self._given_up)
        if not self._nodes:
            raise UserError(
                f"no answer from {names}, and the ranks have never met; see that the launcher can start there"
            )
        left = [rank for rank, node in enumerate(self._nodes) if node in answers.values()]
        try:
            flags = smaller_layout(self._options, self._nodes, left)
        except UserError as error:
            raise UserError(f"the group cannot go on without {names}: {error}") from None
        layout = " ".join(flags) or f"--layout {self._options.parallel.layout}"
        logger.warning("going on without %s: %d of %d ranks, with %s", names, len(left), len(self._nodes), layout)
        return self._command.start(list(answers), len(left)) + flags

    def _probe(self, hosts: Sequence[str], seconds: float) -> dict[str, str]:
        return probe_hosts(self._command, hosts, seconds, lambda: bool(self._signum()))
