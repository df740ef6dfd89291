"""WeightedModule: a module that declares the checkpoint slices of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from labinfer.native.memory import use_huge_pages
from labinfer.weights.codes import QuantLayout
from labinfer.weights.slices import WeightSlice


class WeightedModule(nn.Module):
    """Module that loads its own parameters from a checkpoint, and packs them for kernels."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices that fill this module's own parameters, without those of its children.

        Args:
            prefix: path of the module in the model; names of its tensors begin with it.
        """
        raise NotImplementedError

    def unread(self, prefix: str) -> Iterator[str]:
        """Names of tensors that checkpoints may have for this module although it has no use for them.

        Args:
            prefix: see ``slices``.
        """
        return iter(())

    def choose_forms(self, prefix: str, form: Callable[[str], QuantLayout | None]) -> None:
        """Choose the form in memory of each matrix of this module. Does nothing if the module supports only floating point.

        Args:
            prefix: see ``slices``.
            form: returns the form of a matrix, given the name in its slice; None for floating point.
        """

    def use_float_values(self) -> None:
        """Switch this module to floating-point values, because its tensors turned out to be unquantized; does nothing if the module
        supports only floating point."""

    def check_room(self) -> None:
        """Check, before the checkpoint is read, that there is memory for this module.

        Raises:
            UserError: there is not enough memory.
        """

    def allocate(self, device: torch.device) -> None:
        """Replace tensors on the meta device by uninitialized memory, without those of children."""
        # Not with to_empty, which computes on the meta device: torch would import sympy, a fifth of the start-up time.
        for name, tensor in [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if device.type == "cpu":
                use_huge_pages(memory.data_ptr(), memory.nbytes)
            setattr(
                self, name, nn.Parameter(memory, requires_grad=False) if isinstance(tensor, nn.Parameter) else memory
            )

    def load(self, prefix: str, read: Callable[[WeightSlice], None]) -> None:
        """Fill and pack this module's own parameters, whose memory is already allocated.

        Args:
            read: fills the destination of a slice.
        """
        for part in self.slices(prefix):
            read(part)
        self.pack()

    def pack(self) -> None:
        """Pack loaded parameters into the order that kernels read."""

    @property
    def packing(self) -> str:
        """Text that is equal for modules that pack equal slices into equal bytes."""
        return ""

    def export_packed(self) -> dict[str, Any] | None:
        """This module's packed weights: tensors in host memory and plain values, by name; None if not cacheable."""
        return {name: parameter.detach() for name, parameter in self.named_parameters(recurse=False)}

    def import_packed(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``export_packed`` returned for an equal module, instead of calling ``allocate`` and ``load``.

        The tensors may be in read-only memory.
        """
        for name, _ in [*self.named_parameters(recurse=False)]:
            setattr(self, name, nn.Parameter(state[name], requires_grad=False))
        for name, buffer in [*self.named_buffers(recurse=False)]:  # counters start at 0
            setattr(self, name, torch.zeros(buffer.shape, dtype=buffer.dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of this module's own weights, without those of its children."""
        return sum(parameter.nbytes for parameter in self.parameters(recurse=False))


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> nn.Parameter:
    """Parameter to be filled from a checkpoint, without gradient; by default on torch's current device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
