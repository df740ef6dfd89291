"""``Graph``: captured function calls of a step, which one call replays; ``Capture``: the protocol for capturing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, Protocol

import torch

from labinfer.functions.attention_batch import AttentionBatch

SHARED_BYTES = 32 << 20
"""Maximum bytes of memory that graphs on CPUs share."""


class Graph(Protocol):
    """A captured sequence of calls that replays without Python."""

    @property
    def num_bytes(self) -> int:
        """Bytes of intermediate tensors that the graph does not share with other graphs."""
        ...

    @property
    def program_bytes(self) -> int:
        """Memory of the graph's program (the recorded calls) in bytes."""
        ...

    def replay(self, batch: AttentionBatch | None = None) -> None:
        """Run the captured calls again, on the same input and output memory.

        Args:
            batch: batch of this step, for graphs whose kernels take context lengths from the host. Its tensors have the addresses of the
                captured batch's, its lists may have other values.
        """


class Capture(Protocol):
    """Captures the function calls that a callable makes, as a graph that replays them without Python."""

    def __call__(
        self,
        run: Callable[[], torch.Tensor],
        dry_run: Callable[[], torch.Tensor],
        batch: AttentionBatch | None = None,
    ) -> tuple[torch.Tensor, Graph | None]:
        """Call ``run``. Returns its result, and the graph of its calls (None if they cannot be captured). Only replays of this graph
        overwrite the result.

        ``run`` must be replayable with other values in the same memory: no Python code may depend on values read from tensors, and all work goes
        through functions, torch, or operations that support ``__torch_function__``.

        Args:
            dry_run: ``run`` on a batch whose lists are ``HostReadGuard``; for captures that trace the calls a second time.
            batch: batch of ``run``, with its lists. A kernel that finds guards may take the lists from here through its capture, if
                ``Graph.replay`` updates them.
        """
        ...


class NotReplayable(Exception):
    """A step reads a list of its batch in Python, so a replay would reuse stale values."""


class HostReadGuard(Sequence[int]):
    """Stand-in for a list of a batch; raises if a dry run reads it.

    Args:
        name: name of the list, for the error.
    """

    def __init__(self, name: str):
        self._name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise NotReplayable(f"{self._name} is read in Python")

    __getitem__ = __len__ = __iter__ = __contains__ = __eq__ = __hash__ = __add__ = __radd__ = _refuse


def for_dry_run(batch: AttentionBatch) -> AttentionBatch:
    """Copy of ``batch`` with a ``HostReadGuard`` in place of each list; its tensors are unchanged."""
    guards = {name: HostReadGuard(name) for name in ("row_ptr", "context_lens", "table_ptr")}
    return replace(batch, **guards, _parts={})
