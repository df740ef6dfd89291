"""Helper processes say how they ended: out of memory, by a signal, by an error, out of time."""

from __future__ import annotations

import sys
import time

import pytest

from labinfer.text.helper_process import HelperEnded, HelperProcess, HelperRefused, HelperTimeout

MODULE = """
import os, signal, sys, time
from labinfer.text.helper_process import answer_messages

def answer(message):
    eval(message.decode())
    return b"done"

answer_messages(answer, seconds=1, most_bytes=1 << 30)
"""


@pytest.fixture
def helper(tmp_path, monkeypatch):
    (tmp_path / "obeying.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    helper = HelperProcess("obeying", "", 1.0)
    yield helper
    helper.close()


def test_end_of_a_helper_is_told_as_it_was(helper):
    ends = {
        "bytearray(1 << 40)": (HelperEnded, "^it takes too much memory$"),
        "os.kill(os.getpid(), signal.SIGKILL)": (HelperEnded, "^its process was killed by SIGKILL$"),
        "os.abort()": (HelperEnded, "killed by SIGABRT, probably out of memory or stack$"),
        "os._exit(7)": (HelperEnded, "^its process failed with exit status 7$"),
        "1 / 0": (HelperEnded, "^its process failed with exit status 1$"),
        "time.sleep(9)": (HelperTimeout, "^it takes more than 1 s$"),
    }
    for message, (kind, text) in ends.items():
        with pytest.raises(kind, match=text) as caught:
            helper.ask(message.encode())
        assert caught.type is kind
        assert helper.ask(b"0") == b"done"


def test_helper_that_does_not_start_says_how_it_ended(monkeypatch):
    with pytest.raises(HelperRefused, match="no_such_module did not start: its process failed with exit status 1"):
        HelperProcess("no_such_module", "", 1.0).ask(b"")


def test_answer_that_comes_as_the_process_is_ended_is_late(helper):
    assert helper.ask(b"0") == b"done"
    with pytest.raises(HelperTimeout):
        helper._within(helper._process, 0.05, lambda: time.sleep(0.3) or b"late")
    assert not helper.is_running
    assert helper.ask(b"0") == b"done"
