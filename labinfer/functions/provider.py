"""``Provider``: where implementations come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from labinfer.functions.ceilings import Ceilings
from labinfer.functions.expert_offload import ExpertOffload
from labinfer.functions.graph import Capture
from labinfer.functions.registry import FunctionRegistry
from labinfer.native.compiler import OnProgress


class Provider(Protocol):
    """A source of implementations for some types of devices: a folder of ``functions/``, made once on each rank.

    What it compiles, loads and imports is its own; a device that it has nothing for makes it register nothing.
    """

    def prepare(self, device: torch.device, on_progress: OnProgress = lambda done, total: None) -> None:
        """Compile and load what this device can use. Called on one rank of each node first, then on its others.

        What cannot be had is logged and goes without: there is always the reference.

        Args:
            on_progress: hears of what is compiled.
        """

    def register(self, registry: FunctionRegistry, group_size: int) -> None:
        """Add every implementation that is ready.

        Args:
            group_size: inputs that share a scale in int4.
        """

    def fingerprint(self) -> tuple[object, ...]:
        """Everything that the speed of its implementations depends on beside their arguments.

        Times are remembered for each fingerprint.
        """
        return ()

    def ceilings(self) -> Ceilings | None:
        """The most that the device allows, measured; None where this cannot be."""
        return None

    def borrow_cores(self, lent: Mapping[int, int]) -> None:  # noqa: B027
        """Also compute on cores of other processes while they are lent, from now on, in place of those of an earlier call.

        Args:
            lent: by the number of a CPU, the address of a 32-bit word that is not 0 while it is lent. Words stay where they are for good.
        """

    def capture(self) -> Capture | None:
        """Capture of calls of its functions; None where there is none."""
        return None

    def expert_offload(self, num_bytes: int, folder: Path) -> ExpertOffload | None:
        """A place for its experts: so many bytes of memory, and a file in a folder. None where they cannot be in a file.

        Raises:
            UserError: there can be no file.
        """
        return None

    def loading(self) -> object | None:
        """Functions for loading, as in ``weights.loading.LoadFunctions``; None where there are none."""
        return None
