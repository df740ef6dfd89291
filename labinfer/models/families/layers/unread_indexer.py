"""``UnreadIndexer``: the tensors that choose keys of sparse attention, in layers whose attention is computed densely."""

from __future__ import annotations

from collections.abc import Iterator

from labinfer.weights.slices import WeightSlice
from labinfer.weights.weighted_module import WeightedModule


class UnreadIndexer(WeightedModule):
    """Module without weights; tensors under its name may be in a checkpoint and are not loaded.

    Args:
        names: names of these tensors' modules, if a family renames each of them; empty for all tensors under the module's name.
    """

    def __init__(self, names: tuple[str, ...] = ()):
        super().__init__()
        self._names = names

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        return iter(())

    def unread(self, prefix: str) -> Iterator[str]:
        yield from (f"{prefix}.{name}" for name in self._names) if self._names else (prefix,)
