"""``launch.py`` whose rank 0 is killed by a step of a request whose prompt is ``POISON``."""

from __future__ import annotations

import os
import signal

from labinfer.cli.main import main
from labinfer.server.host.engine_host import EngineHost

POISON = [7, 7, 7]


def add(self, frame, plain=EngineHost._add):
    plain(self, frame)
    if list(frame.request.prompt_token_ids) == POISON:
        self.poisoned = frame.request.key


def step(self, model, plain=EngineHost._step):
    if getattr(self, "poisoned", None) in self._open:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(self, model)


if __name__ == "__main__":
    EngineHost._add, EngineHost._step = add, step
    raise SystemExit(main())
