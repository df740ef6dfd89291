"""History: the messages that were typed, kept for the next time."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

LONGEST = 1000
"""Messages that are kept."""


@dataclass
class History:
    """A file of messages, the oldest first, each a line of JSON. Where it cannot be read or written, there is none.

    Args:
        path: None for a history that is not kept.
    """

    path: Path | None
    texts: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None = None) -> History:
        """As it was left, cut to its newest messages.

        Args:
            path: where it is not the user's own.
        """
        try:
            path = path or Path.home() / ".local" / "state" / "labinfer" / "chat-history.jsonl"
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            history = cls(path, _read(path))
            if len(history.texts) > LONGEST:
                history.texts = history.texts[-LONGEST:]
                fresh = path.with_suffix(f".{os.getpid()}")
                with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                    file.writelines(map(_line, history.texts))
                fresh.replace(path)
            return history
        except (OSError, RuntimeError):
            return cls(None)

    def append(self, text: str) -> None:
        """At once, so that a chat that is killed has lost nothing."""
        self.texts.append(text)
        if self.path is None:
            return
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
            try:
                os.write(fd, _line(text).encode())
            finally:
                os.close(fd)
        except OSError:
            self.path = None


def _line(text: str) -> str:
    return json.dumps(text) + "\n"


def _read(path: Path) -> list[str]:
    if not path.exists():
        return []
    if not path.is_file():  # a FIFO, of which a read would wait for a writer
        raise OSError(f"{path} is not a file")
    texts = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            text = json.loads(line)
        except ValueError:  # half a line, of a full disk for one
            continue
        if isinstance(text, str):
            texts.append(text)
    return texts
