"""The process in which something can be used."""

import os

import pytest

from labinfer.api.fork_guard import ForkGuard
from labinfer.base.errors import UserError


def test_fork_of_the_first_process_is_refused(monkeypatch):
    home = ForkGuard()
    assert not home.is_here
    for _ in range(2):
        home.enter()
    assert home.is_here
    first = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: first + 1)
    assert not home.is_here
    with pytest.raises(UserError, match=f"forked from process {first} .*get_context"):
        home.enter()
