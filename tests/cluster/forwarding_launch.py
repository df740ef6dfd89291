"""``launch.py`` whose ranks forward commands from the second follower on, each to two; with a fault of ``faulty_launch.py`` where
one is asked for."""

from __future__ import annotations

import functools
import os
import runpy
from pathlib import Path

from labinfer.comm.spmd.command_senders import command_senders
from labinfer.launch import communicators

if __name__ == "__main__":
    communicators.command_senders = functools.partial(command_senders, max_direct=1, fan_out=2)
    here = Path(__file__).parent
    script = here / "faulty_launch.py" if "FAULT" in os.environ else here.parent.parent / "launch.py"
    runpy.run_path(str(script), run_name="__main__")
