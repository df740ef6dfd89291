"""``Provider``: where implementations come from."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from labinfer.functions.registry import FunctionRegistry
from labinfer.native.compiler import OnProgress


class Provider:
    """A source of implementations for some types of devices: a folder of ``functions/``, or a plugin's class. It is made without arguments,
    once on each rank, when a model is loaded.

    What it compiles, loads and imports is its own; a device that it has nothing for makes it register nothing. An implementation is a
    callable of its function's protocol in ``functions/protocols.py``:

    - It computes what ``functions/reference`` computes, up to rounding, for arguments of every size; what it does not take it hands to the
      reference. Its result does not depend on the batch's other sequences.
    - It is called in every step by the thread that computes, and must not communicate with other ranks.
    - It reads a cache only where the batch's tokens, or earlier ones of their sequences, were written. All other memory of a pool may hold
      NaN, padding of a sequence's last block included, and 0 times NaN is NaN.
    - It keeps none of its arguments: their memory is used again.

    Implementations of plugins that layers' ``calls()`` lead to are held to that before a run uses them, see ``check_plugins``. Small steps
    with one of them are not captured on CPUs, as it may read the batch's lists.
    """

    def prepare(self, device: torch.device, on_progress: OnProgress = lambda done, total: None) -> None:
        """Compile and load what this device can use. Called on one rank of each node first, then on its others.

        What cannot be had is logged and goes without: there is always the reference.

        Args:
            on_progress: hears of what is compiled.
        """

    def register(self, registry: FunctionRegistry, group_size: int) -> None:
        """Add every implementation that is ready; where nothing is measured, the last one that is added is preferred.

        Args:
            group_size: inputs that share a scale in int4.
        """
        raise NotImplementedError

    def fingerprint(self) -> tuple[object, ...]:
        """Everything that the speed and the packed weights of its implementations depend on beside their arguments, such as the version of
        a library. A plugin's own file need not be named: caches are kept for each version of it.
        """
        return ()

    def ceilings(self) -> Any:
        """The most that the device allows, measured, as ``ceilings.Ceilings``; None where this cannot be."""
        return None

    def compiled(self) -> ctypes.CDLL | None:
        """The compiled library behind its functions, None where there is none. Stages share cores where it exports ``use_idle_cores``."""
        return None

    def capture(self) -> Any:
        """Capture of calls of its functions, as ``graph.Capture``; None where there is none."""
        return None

    def expert_offload(self, num_bytes: int, folder: Path) -> Any:
        """Offload of a mixture's experts, an ``expert_offload.ExpertOffload``, or None if this provider has none.

        Args:
            num_bytes: of memory for experts; the others are in a file.
            folder: of the file.

        Raises:
            UserError: the file cannot be made.
        """
        return None

    def loading(self) -> Any:
        """Functions for loading, as in ``weights.loading.LoadFunctions``; None where there are none."""
        return None
