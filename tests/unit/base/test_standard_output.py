"""Standard output whose reader is gone raises ``Interrupted``, with and without a buffer; other broken pipes do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, socket, sys
from labinfer.base.errors import Interrupted
from labinfer.base.standard_output import interrupt_at_closed_output

interrupt_at_closed_output()
here, peer = socket.socketpair()
peer.close()
try:
    here.send(b"text")
except BrokenPipeError:
    pass
try:
    print("text", flush=True)
except Interrupted as error:
    sys.stderr.write(f"signal {error.signum}")
    sys.stderr.flush()
    os._exit(3)
"""


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("is_read", [False, True])
def test_only_output_without_a_reader_interrupts(flags, is_read):
    read, write = os.pipe()
    if not is_read:
        os.close(read)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *flags, "-c", PROGRAM]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
    os.close(write)
    if is_read:
        assert (done.returncode, done.stderr, os.read(read, 100)) == (0, "", b"text\n")
        os.close(read)
    else:
        assert (done.returncode, done.stderr) == (3, f"signal {int(signal.SIGPIPE)}")


def test_closed_output_stays_none():
    program = "from labinfer.base import standard_output; standard_output.interrupt_at_closed_output(); import sys; sys.exit(sys.stdout is None)"
    shell = ["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, "-c", program]
    assert subprocess.run(shell, timeout=60).returncode == 1
