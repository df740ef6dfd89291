"""SignalGuard at a prompt: no signal is lost, not even in the instant before the wait for a key."""

from __future__ import annotations

import os
import signal
import sys

from launchers import ROOT
from pseudo_terminal import pseudo_terminal

from labinfer.comm.group.signals import NUDGE

PROMPTER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from labinfer.base.errors import Interrupted
from labinfer.cli.terminal.line_editor import LineEditor
from labinfer.comm.group.signals import SignalGuard
signals, editor = SignalGuard(), LineEditor([], can_stop=False)
signals.running, signals.interrupt_ends = True, False
while True:
    try:
        with signals.raising():
            editor.read("> ")
    except Interrupted as error:
        print(f"[{{error.signum}}]", flush=True)
        if error.signum != 2:
            sys.exit(9)
        signals.signum = 0
"""


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
