"""ForkGuard: the process in which something can be used, and a refusal in forks of it."""

from __future__ import annotations

import os

from labinfer.base.errors import UserError


class ForkGuard:
    """The process that was the first to use an LLM: threads of torch and of the compiled functions do not outlive a fork."""

    def __init__(self) -> None:
        self._number = 0

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._number

    def enter(self) -> None:
        """Make this process the one, if there is none yet.

        Raises:
            UserError: it is a fork of the one.
        """
        self._number = self._number or os.getpid()
        if not self.is_here:
            raise UserError(
                f"this process is a fork of process {self._number}, which has used an LLM: its threads are not here, so "
                'nothing can run; fork before, or start processes with multiprocessing.get_context("spawn")'
            )
