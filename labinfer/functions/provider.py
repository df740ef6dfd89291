"""``Provider``: base class of the sources of function implementations."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import torch

from labinfer.functions.registry import FunctionRegistry
from labinfer.native.compiler import OnProgress


class Provider:
    """A source of implementations for some device types: a folder of ``functions/``, or a plugin's class. It is constructed without
    arguments, once on each rank, when a model is loaded.

    A provider compiles, loads and imports its own libraries. For a device that it does not support it registers nothing. An implementation
    is a callable of its function's protocol in ``functions/protocols.py``:

    - It computes the result of ``functions/reference``, up to rounding, for arguments of every size; it passes unsupported arguments to
      the reference. A sequence's result does not depend on the batch's other sequences.
    - It is called in every step by the compute thread, and must not communicate with other ranks.
    - It reads a cache only in slots that tokens of the batch, or earlier tokens of their sequences, have written. All other memory of a
      pool, including the unused end of a sequence's last block, may hold NaN, and 0 times NaN is NaN.
    - It keeps no reference to its arguments: their memory is reused.

    Implementations of plugins, and of accelerators, are compared with the reference before a run uses them, and dropped if they fail;
    see ``trial``. Small steps that call one of them are not captured on CPUs, as it may read the batch's lists.
    """

    device: ClassVar[Any] = None
    """Description of a type of device for all ranks, a ``device.Device``; None if the provider only adds functions. If several
    providers describe one type, the last one registered counts."""

    is_portable = False
    """Whether every x86 processor must compute the same bits; set before ``prepare``."""

    def prepare(self, device: torch.device, on_progress: OnProgress = lambda done, total: None) -> None:
        """Compile and load the libraries for ``device``. Called on one rank of each node first, then on the node's other ranks.

        A library that cannot be built or loaded is logged and skipped: the reference is always available.

        Args:
            on_progress: called as compilation proceeds.
        """

    def register(self, registry: FunctionRegistry, group_size: int) -> None:
        """Add every implementation that is ready. Without autotuning, the last one added is preferred.

        Args:
            group_size: inputs that share a scale in int4.
        """
        raise NotImplementedError

    def fingerprint(self) -> tuple[object, ...]:
        """Everything that the speed and the packed weights of this provider's implementations depend on, such as a library version, without
        the arguments of their calls. A plugin's own file need not be included: caches depend on its version anyway."""
        return ()

    def roofline_limits(self) -> Any:
        """Measured roofline limits of the device, a ``RooflineLimits``; None if they cannot be measured."""
        return None

    def compiled(self) -> ctypes.CDLL | None:
        """The compiled library of this provider's functions, or None. Stages share cores if it exports ``use_idle_cores``."""
        return None

    def capture(self) -> Any:
        """Capture of this provider's functions, a ``graph.Capture``; None if it supports none."""
        return None

    def expert_offload(self, num_bytes: int, folder: Path) -> Any:
        """Offload of a mixture's experts, an ``expert_offload.ExpertOffload``, or None if this provider has none.

        Args:
            num_bytes: memory for experts; the others stay in a file.
            folder: folder of this file.

        Raises:
            UserError: the file cannot be created.
        """
        return None

    def loading(self) -> Any:
        """Functions for loading weights, a ``weights.loading.LoadFunctions``; None if there are none."""
        return None
