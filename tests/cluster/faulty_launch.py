"""``launch.py`` with a fault in it: ``FAULT_RANK`` raises, hangs or is killed when it comes to step ``FAULT_STEP``, or, where it drafts,
to the request of this number; or it does not get on while it loads (``FAULT=load``).

The time of the fault, in seconds since 1970, goes to the file ``FAULT_TIME``, if there is one.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

from labinfer.cli.commands import generate
from labinfer.cli.main import main
from labinfer.comm.health_channel import HealthChannel
from labinfer.comm.spmd.environment import detect
from labinfer.engine.remote_drafts import Drafter
from labinfer.worker.worker import Worker

KIND, RANK, STEP = os.environ["FAULT"], int(os.environ["FAULT_RANK"]), int(os.environ.get("FAULT_STEP", "0"))
TIME = os.environ.get("FAULT_TIME")


def note_time():
    if TIME:
        Path(TIME).write_text(str(time.time()))


def hang(session):
    note_time()
    time.sleep(3600)


def stop_afterwards(close):
    def wrapped(self):
        close(self)
        note_time()
        os.kill(os.getpid(), signal.SIGSTOP)

    return wrapped


def fail():
    note_time()
    if KIND == "raise":
        raise RuntimeError("a fault put in by a test")
    if KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def faulty(progress):
    def wrapped(self):
        if self._launched[0][0].step_id == STEP:
            fail()
        return progress(self)

    return wrapped


def faulty_drafter(answer):
    numbers = itertools.count()

    def wrapped(self, request):
        if next(numbers) == STEP:
            fail()
        return answer(self, request)

    return wrapped


if __name__ == "__main__":
    if detect().rank == RANK:
        if KIND == "load":
            generate.load = hang
        elif KIND == "leave":
            HealthChannel.close = stop_afterwards(HealthChannel.close)
        else:
            Worker.progress = faulty(Worker.progress)
            Drafter.answer = faulty_drafter(Drafter.answer)
    raise SystemExit(main())
