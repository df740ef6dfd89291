"""A rendering that is watched leaves nothing behind in the interpreter, whether it was ended or not."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROFILED = """
import cProfile
from labinfer.text import limited_rendering
from labinfer.text.limited_rendering import RenderingEnded, within_limits

limited_rendering.RENDER_SECONDS = 0.1
def spin():
    while True:
        pass
try:
    print(within_limits({render}))
except RenderingEnded as error:
    print("ended:", error)
profiler = cProfile.Profile()
profiler.enable()
print((lambda: 45)())
profiler.disable()
print(within_limits(lambda: "again"))
"""


@pytest.mark.parametrize(
    ("render", "said"),
    [("lambda: 'text'", "text"), ("spin", "ended: it takes more than 0.1 s")],
    ids=["whole", "ended"],
)
def test_profiler_runs_after_a_rendering(render, said):
    # An exception that is set for a thread and taken back leaves a mark in Python 3.11, for which every later call pays,
    # and at which the first traced one stays for ever.
    code = PROFILED.format(render=render)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert ran.stdout.splitlines() == [said, "45", "again"], ran.stderr
