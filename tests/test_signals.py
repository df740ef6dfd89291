"""SignalGuard at a prompt: no signal is lost, not even in the instant before the wait for a key."""

from __future__ import annotations

import os
import signal
import sys
import time

from launchers import ROOT
from pseudo_terminal import pseudo_terminal

from labinfer.comm.group.signals import NUDGE

PROMPTER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from labinfer.base.errors import Interrupted
from labinfer.cli.terminal.line_editor import LineEditor
from labinfer.comm.group.signals import SignalGuard
signals = SignalGuard()
editor = LineEditor(signals, [], can_stop=False)
signals.running, signals.interrupt_ends = True, False
while True:
    try:
        editor.read("> ")
    except Interrupted as error:
        print(f"[{{error.signum}}]", flush=True)
        if error.signum != 2:
            sys.exit(9)
        signals.dismiss_interrupt()
"""

SIGNAL_AT_THREAD_START = f"""
import os, signal, threading
start = threading.Thread.start
def interrupted_start(thread):
    start(thread)
    if thread.name.startswith("line editor"):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), {int(NUDGE)})
threading.Thread.start = interrupted_start
"""


def test_signal_while_the_editor_starts_its_thread(tmp_path):
    with pseudo_terminal([sys.executable, "-c", SIGNAL_AT_THREAD_START + PROMPTER], tmp_path) as terminal:
        terminal.wait_for("[2]")
        terminal.wait_for("> ", seconds=3)
        terminal.type("abc\n")  # the editor goes on: this line ends, and the next prompt comes
        terminal.wait_for("> ", seconds=3)
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.wait(3) == 9
        assert "Traceback" not in terminal.text


def test_termination_while_an_interrupt_is_handled(tmp_path):
    for milliseconds in (0, 2, 5, 10, 20):
        with pseudo_terminal([sys.executable, "-c", PROMPTER], tmp_path) as terminal:
            terminal.wait_for("> ")
            os.kill(terminal.process.pid, signal.SIGINT)
            time.sleep(milliseconds / 1000)
            os.kill(terminal.process.pid, signal.SIGTERM)
            assert terminal.wait(3) == 9, milliseconds


def test_interrupt_just_after_enter(tmp_path):
    with pseudo_terminal([sys.executable, "-c", PROMPTER], tmp_path) as terminal:
        for turn in range(60):
            terminal.wait_for("> ")
            terminal.type("abc\r")
            time.sleep(turn % 6 / 1000)
            os.kill(terminal.process.pid, signal.SIGINT)
            terminal.wait_for("[2]", seconds=3)
        assert "exception" not in terminal.text


def test_signal_just_before_the_wait_for_a_key(tmp_path):
    with pseudo_terminal([sys.executable, "-c", PROMPTER], tmp_path) as terminal:
        for _ in range(60):  # without the nudge one in twenty is lost until a line is typed
            terminal.wait_for("> ")
            terminal.type("abc")
            os.kill(terminal.process.pid, signal.SIGINT)
            terminal.wait_for("[2]", seconds=3)
        terminal.wait_for("> ")
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.wait(3) == 9


def test_signals_that_follow_at_once(tmp_path):
    with pseudo_terminal([sys.executable, "-c", PROMPTER], tmp_path) as terminal:
        for _ in range(60):
            terminal.wait_for("> ")
            for _ in range(20):
                os.kill(terminal.process.pid, signal.SIGINT)
                os.kill(terminal.process.pid, NUDGE)
            terminal.wait_for("[2]", seconds=3)
        assert "Traceback" not in terminal.text
