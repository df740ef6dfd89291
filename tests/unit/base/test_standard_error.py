"""Standard error that cannot be written."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest

from labinfer.base.standard_error import StandardErrorHandler, is_terminal, write_error
from labinfer.observe.line_writer import LineWriter
from labinfer.observe.progress_line import ProgressLine

PROGRAM = """
import os, sys
from labinfer.base.standard_error import protect_standard_streams
protect_standard_streams()
opened = os.open("FILE", os.O_WRONLY | os.O_CREAT)
print("one", file=sys.stderr)
os.write(2, b"two")
import warnings, logging
warnings.warn("three")
logging.getLogger("x").error("four")
try:
    os.write(1, b"result")
except OSError:
    sys.exit(opened)
"""


class Broken(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")

    def isatty(self):
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stream", [None, Broken(), io.StringIO()])
def test_writers_lose_what_cannot_be_written(monkeypatch, stream):
    if isinstance(stream, io.StringIO) and not isinstance(stream, Broken):
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    write_error("text")
    StandardErrorHandler().emit(logging.makeLogRecord({"msg": "text"}))
    line = ProgressLine(at_once=True)
    line.update("text")
    line.close()
    assert not is_terminal()


def test_line_writer_loses_what_cannot_be_written():
    with open("/dev/full", "wb") as full:
        writer = LineWriter(full.fileno())
        writer.write("text\n")
        writer.close()


def test_files_never_take_the_place_of_closed_descriptors(tmp_path):
    program = PROGRAM.replace("FILE", str(tmp_path / "file"))
    shell = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", program]
    assert subprocess.run(shell).returncode > 2  # the descriptor that the file has got
    assert (tmp_path / "file").read_text() == ""


def test_log_record_is_written_over_a_progress_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    stream.isatty = lambda: True
    line = ProgressLine()
    line.update("loading weights")
    StandardErrorHandler().emit(logging.makeLogRecord({"msg": "text"}))
    line.update("loaded")
    line.close()
    assert stream.getvalue() == "\rloading weights\r\x1b[Ktext\n\rloaded         \r\r      \r"


def test_log_record_with_wrong_arguments_raises_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    StandardErrorHandler().handle(logging.makeLogRecord({"msg": "%d files", "args": ("three",)}))
    assert "Logging error" in stream.getvalue()
