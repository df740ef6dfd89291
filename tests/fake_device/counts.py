"""Counts copies between the host and the cards, and waits for them, by the Python line that caused them."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

KINDS = ("h2d", "late h2d", "d2h", "late d2h", "wait")
"""In the order of device.h's ``Event``: blocking and non-blocking uploads and downloads; operators and calls that wait for a card."""
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.c_int)


class Counts:
    """Number of events by kind and line.

    Args:
        folder: where each process writes its counts when it ends, as ``PID.json``; None for nowhere.
    """

    def __init__(self, library: ctypes.CDLL, folder: Path | None):
        self.events: Counter[tuple[str, str]] = Counter()
        self._library, self._folder = library, folder
        self._callback = CALLBACK(self._note)
        library.fake_device_count_with(self._callback)
        atexit.register(self._end)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Counts by kind, then by line."""
        found: dict[str, dict[str, int]] = {}
        for (kind, line), number in sorted(self.events.items()):
            found.setdefault(kind, {})[line] = number
        return found

    def _note(self, kind: int, site, size: int) -> None:
        line = calling_line(sys._getframe(1))
        self.events[KINDS[kind], line] += 1
        ctypes.memmove(site, line.encode()[: size - 1] + b"\0", min(len(line), size - 1) + 1)

    def _end(self) -> None:
        self._library.fake_device_count_with(ctypes.cast(None, CALLBACK))
        if self._folder is not None:
            (self._folder / f"{os.getpid()}.json").write_text(json.dumps(self.snapshot()))


def calling_line(frame: FrameType | None) -> str:
    """The innermost line outside torch, as ``folder/file.py:12 function``."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and "/fake_device/" not in file and not file.startswith("<"):
            return f"{'/'.join(file.split('/')[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
