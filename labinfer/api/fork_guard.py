"""ForkGuard: refuses to use an LLM in a process that was forked from one that has used an LLM."""

from __future__ import annotations

import os

from labinfer.base.errors import UserError


class ForkGuard:
    """Remembers the process that used an LLM first, and refuses processes forked from it: a forked process lacks the threads of
    torch and of the compiled functions."""

    def __init__(self) -> None:
        self._number = 0

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._number

    def enter(self) -> None:
        """Register this process as the one that uses LLMs, if none is registered yet.

        Raises:
            UserError: this process was forked from the registered process.
        """
        self._number = self._number or os.getpid()
        if not self.is_here:
            raise UserError(
                f"this process was forked from process {self._number} after an LLM was used there, and a fork does not copy threads; "
                'fork before using an LLM, or start processes with multiprocessing.get_context("spawn")'
            )
