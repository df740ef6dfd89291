"""The first answer of a newcomer, on a terminal and with an empty cache: something is said all the time."""

from __future__ import annotations

import pytest
from launchers import LAUNCH, command
from pseudo_terminal import pseudo_terminal

SILENCE_SECONDS = 2.0


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize(("launcher", "ranks"), [("single", 1), ("mpirun", 2)])
def test_first_answer_on_an_empty_cache_comes_without_a_long_silence(launcher, ranks, tmp_path):
    (tmp_path / ".cache").mkdir()
    question = ("--model", "demo", "--prompt", "17 + 25 = ?", "--temperature", "0")
    with pseudo_terminal(command(launcher, ranks, LAUNCH, *question), tmp_path) as terminal:
        terminal.wait_for("compiling C++ kernels for this machine")
        terminal.wait_for("42", 240)
        silences = [(seconds, text[-100:]) for seconds, text in terminal.pieces if seconds > SILENCE_SECONDS]
    assert silences == [], "each with what came after it"
