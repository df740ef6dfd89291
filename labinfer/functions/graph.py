"""``Graph``: calls of functions that were captured, to be made again as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, Protocol

import torch

from labinfer.functions.attention_batch import AttentionBatch

SHARED_BYTES = 32 << 20
"""Memory that graphs on CPUs share, at most."""


class Graph(Protocol):
    """Calls of a step without the Python around them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of what is computed in between, where no other graph computes."""
        ...

    @property
    def program_bytes(self) -> int:
        """Bytes of the calls, whatever they compute."""
        ...

    def replay(self) -> None:
        """Do the same again, reading from and writing to the same memory."""


class Capture(Protocol):
    """Runs something and captures it."""

    def __call__(
        self, run: Callable[[], torch.Tensor], dry_run: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Graph | None]:
        """Call ``run``; its result, in memory that this graph alone writes again, and the graph. None where something in it cannot be captured.

        What runs must do the same again for other numbers in the same places: nothing in it may depend on what it reads from
        tensors in Python, nor go past functions and torch, but for operations that show themselves to torch as its own.

        Args:
            dry_run: ``run`` on a batch whose lists are ``HostReadGuard``; for a capture that traces the calls a second time.
        """
        ...


class NotReplayable(Exception):
    """A step depends on a list of its batch, which another step does not have."""


class HostReadGuard(Sequence[int]):
    """A list of a batch that must not be read in a dry run.

    Args:
        name: of the list, for the error.
    """

    def __init__(self, name: str):
        self._name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise NotReplayable(f"{self._name} is read in Python")

    __getitem__ = __len__ = __iter__ = __contains__ = __eq__ = __hash__ = __add__ = __radd__ = _refuse


def for_dry_run(batch: AttentionBatch) -> AttentionBatch:
    """The batch with guards in place of its lists; its tensors stay."""
    guards = {name: HostReadGuard(name) for name in ("row_ptr", "context_lens", "table_ptr")}
    return replace(batch, **guards, _parts={})
