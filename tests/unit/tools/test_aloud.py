"""tools/aloud.py: a command that is seen to go on."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

ALOUD = Path(__file__).parents[3] / "tools/aloud.py"
TALK = """
import sys, time
print("Collecting numpy")
print("Requirement already satisfied: torch in ./.venv")
sys.stdout.flush()
time.sleep({seconds})
print("done", flush=True)
print("trouble", file=sys.stderr)
sys.exit(3)
"""


def command(seconds: float) -> list[str]:
    return [sys.executable, str(ALOUD), sys.executable, "-c", TALK.format(seconds=seconds)]


def test_off_a_terminal_everything_passes_but_what_is_there_already():
    done = subprocess.run(command(0), capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("Collecting numpy\ndone\n", "trouble\n", 3)


def test_on_a_terminal_silence_is_counted():
    far, near = pty.openpty()
    process = subprocess.Popen(command(1.5), stdout=near, stderr=near)
    os.close(near)
    text, deadline = b"", time.monotonic() + 30
    while not (b"trouble" in text and text.endswith(b"\n")) and time.monotonic() < deadline:
        text += os.read(far, 1024)
    assert process.wait(30) == 3
    os.close(far)
    assert b"... 1 s" in text and b"already satisfied" not in text
    assert text.replace(b"\r", b"").endswith(b"\x1b[Kdone\ntrouble\n")
