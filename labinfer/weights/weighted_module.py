"""WeightedModule: a module that says which slices of a checkpoint its parameters are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from labinfer.native.memory import use_huge_pages
from labinfer.weights.codes import CodeForm
from labinfer.weights.slices import WeightSlice


class WeightedModule(nn.Module):
    """A module with parameters of its own."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """The slices that fill this module's own parameters, children excluded.

        Args:
            prefix: the module's path in the model, which names its tensors in the checkpoint.
        """
        raise NotImplementedError

    def unread(self, prefix: str) -> Iterator[str]:
        """Paths whose tensors a checkpoint may have beside this module's, and which nothing needs.

        Args:
            prefix: as for ``slices``.
        """
        return iter(())

    def choose_forms(self, prefix: str, form: Callable[[str], CodeForm | None]) -> None:
        """Take notice of the forms in which this module's matrices are to be held, as far as it can.

        Args:
            prefix: as for ``slices``.
            form: of a matrix by its name, as in ``slices``; None for values.
        """

    def hold_values(self) -> None:
        """Take back codes, because the checkpoint has values, where this module can have them."""

    def check_room(self) -> None:
        """Refuse memory that is not to be had for this module, before any of the checkpoint is read.

        Raises:
            UserError: says why.
        """

    def allocate(self, device: torch.device) -> None:
        """Replace memory on the meta device by uninitialised memory, children excluded."""
        # Not by to_empty, which computes on the meta device: for that torch imports sympy, which takes a fifth of a start.
        for name, tensor in [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if device.type == "cpu":
                use_huge_pages(memory.data_ptr(), memory.nbytes)
            setattr(
                self, name, nn.Parameter(memory, requires_grad=False) if isinstance(tensor, nn.Parameter) else memory
            )

    def load(self, prefix: str, read: Callable[[WeightSlice], None]) -> None:
        """Fill and pack this module's own parameters, whose memory is there.

        Args:
            read: fills a slice's destination.
        """
        for part in self.slices(prefix):
            read(part)
        self.pack()

    def pack(self) -> None:
        """Bring loaded parameters into the form in which functions read them."""

    @property
    def packing(self) -> str:
        """Text that differs where this module's slices are the same, and packed otherwise."""
        return ""

    def export_packed(self) -> dict[str, Any] | None:
        """State of this module's own weights once they are packed: tensors in host memory and plain values, by name. None where
        they cannot be kept beyond the process."""
        return {name: parameter.detach() for name, parameter in self.named_parameters(recurse=False)}

    def import_packed(self, state: Mapping[str, Any]) -> None:
        """Take what ``export_packed`` gave another module that was made in the same way, instead of ``allocate`` and ``load``.

        The tensors may be in memory that cannot be written to.
        """
        for name, _ in [*self.named_parameters(recurse=False)]:
            setattr(self, name, nn.Parameter(state[name], requires_grad=False))
        for name, buffer in [*self.named_buffers(recurse=False)]:  # counters, which begin at 0
            setattr(self, name, torch.zeros(buffer.shape, dtype=buffer.dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of this module's own weights, children excluded."""
        return sum(parameter.nbytes for parameter in self.parameters(recurse=False))


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> nn.Parameter:
    """A parameter to be filled from a checkpoint; it takes no gradient. By default on torch's present device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
