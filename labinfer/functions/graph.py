"""``Graph``: calls of functions that were captured, to be made again as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import torch

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
        self, run: Callable[[], torch.Tensor], rehearse: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Graph | None]:
        """Call ``run``; its result, in memory that this graph alone writes again, and the graph. None where something in it cannot be captured.

        What runs must do the same again for other numbers in the same places: nothing in it may depend on what it reads from
        tensors in Python, nor go past functions and torch, but for operations that show themselves to torch as its own.

        Args:
            rehearse: the same on a batch whose lists are ``Unreadable``; for a capture that goes through it once more without
                carrying it out.
        """
        ...


class NotReplayable(Exception):
    """A step that is rehearsed depends on a list of its batch, which another step does not have."""


class Unreadable(Sequence[int]):
    """A list of a batch that is rehearsed.

    Args:
        name: of the list, for the error.
    """

    def __init__(self, name: str):
        self._name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise NotReplayable(f"{self._name} is read in Python")

    __getitem__ = __len__ = __iter__ = __contains__ = __eq__ = __hash__ = __add__ = __radd__ = _refuse
