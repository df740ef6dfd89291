"""What a vendor's ``torch.npu`` or ``torch.musa`` offers, for the make-believe cards."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from .counts import Counts

VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "musa": "MUSA_VISIBLE_DEVICES", "mlu": "MLU_VISIBLE_DEVICES"}
"""The vendors' variables that choose a process's cards."""


class Cards:
    """The device module ``torch.NAME``.

    Args:
        numbers: numbers of this process's cards on their host.
        host: name of the host; equal numbers on different hosts are different cards.
    """

    def __init__(self, name: str, library: ctypes.CDLL, counts: Counts, numbers: Sequence[str], host: str, size: int):
        self.name = name
        self.counts = counts
        self.Stream, self.Event = torch.Stream, torch.Event
        self._library, self._numbers, self._host, self._size = library, numbers, host, size

    def identity(self, index: int) -> str:
        """Name of a card that no other card has."""
        return f"{self._host}/{self.name}-{self._numbers[index]}"

    def is_available(self) -> bool:
        return bool(self._numbers)

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self._numbers)

    def current_device(self) -> int:
        return self._library.fake_device_current()

    def set_device(self, device) -> None:
        self._library.fake_device_set(self._index(device))

    def current_stream(self, device=None) -> torch.Stream:
        return torch.accelerator.current_stream(self._index(device))

    def synchronize(self, device=None) -> None:
        torch.accelerator.synchronize(self._index(device))

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return self._size - self.memory_allocated(device), self._size

    def memory_allocated(self, device=None) -> int:
        return self._library.fake_device_allocated(self._index(device), 0)

    def memory_reserved(self, device=None) -> int:
        return self.memory_allocated(device)

    def max_memory_allocated(self, device=None) -> int:
        return self._library.fake_device_allocated(self._index(device), 1)

    def was_used(self, device=None) -> bool:
        """Whether this process ever had memory on the card."""
        return bool(self._library.fake_device_was_used(self._index(device)))

    def num_kernels(self) -> int:
        """Kernels that this process has started."""
        return self._library.fake_device_num_kernels()

    def get_device_name(self, device=None) -> str:
        return f"make-believe {self.name}"

    def get_device_properties(self, device=None) -> SimpleNamespace:
        index = self._index(device)
        return SimpleNamespace(name=self.get_device_name(), total_memory=self._size, uuid=self.identity(index))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """No operator of a card draws random numbers of its own."""

    def _index(self, device) -> int:
        if device is None:
            return self.current_device()
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.current_device() if index is None else index


def visible_numbers(name: str, num_cards: int) -> list[str]:
    """Numbers of the cards that the vendor's variable leaves to this process; all of them without it."""
    value = os.environ.get(VISIBLE.get(name, f"{name.upper()}_VISIBLE_DEVICES"))
    return (
        [str(number) for number in range(num_cards)] if value is None else [part for part in value.split(",") if part]
    )
