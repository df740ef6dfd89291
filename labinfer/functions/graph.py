"""``Graph``: calls of functions that were captured, to be made again as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """Calls of a step without the Python around them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is computed in between, and of the result."""
        ...

    def replay(self) -> None:
        """Do the same again, reading from and writing to the same memory."""


Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Graph | None]]
"""Run something and capture it: its result, in memory that the graph writes again, and the graph. None where something in it
cannot be captured.

What runs must do the same again for other numbers in the same places: nothing in it may depend on what it reads from tensors
in Python, nor go past functions and torch, but for operations that show themselves to torch as its own.
"""
