"""watch_waits: finds out whether a step makes the host wait for its device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import ModuleType

import torch

SYNCHRONIZES = "called a synchronizing"
"""Part of the warning about an operation that waits for the device, in ``set_sync_debug_mode("warn")``; the device's name follows."""


def watch_waits(run: Callable[[], torch.Tensor], backend: ModuleType) -> tuple[torch.Tensor, bool]:
    """Call ``run``. Returns its result, and whether it synchronized the host with the device, which a captured step must not do.

    Args:
        backend: torch's module of the device, with ``set_sync_debug_mode``: ``torch.cuda`` or ``torch_npu.npu``.
    """
    before, thread, waits = backend.get_sync_debug_mode(), threading.get_ident(), []

    def hear(message: Warning | str, *others: object) -> None:
        if SYNCHRONIZES in str(message) and threading.get_ident() == thread:  # other threads may synchronize
            waits.append(message)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        backend.set_sync_debug_mode("warn")  # this call itself warns that it is a prototype
        try:
            out = run()
        finally:
            backend.set_sync_debug_mode(before)
    return out, bool(waits)
