"""What holds in every test: short waits of OpenMP's threads, little to look through for garbage, samples of large matrices, and
books of KV blocks that agree."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from pairwise import mark_slow_cases

from labinfer.comm.spmd.environment import shorten_openmp_spins

shorten_openmp_spins()  # as a run does, before anything imports torch
MANY_MODULES = 20
NUM_FROZEN = pytest.StashKey[int]()
"""Modules that were imported when garbage was frozen last."""
LAST_FILE = pytest.StashKey[Path]()

gc.disable()  # also as a run does, while modules are imported and tests are collected

hypothesis.settings.register_profile("untimed", hypothesis.settings(), deadline=None)  # other tests run beside these
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser):
    parser.addoption("--fuzz-cases", type=int, default=0, help="cases of each fuzzer, instead of a small sample")
    parser.addoption("--fuzz-seed", type=int, default=1, help="seed of the fuzzers")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_slow_cases(items)  # before those marked slow are left out


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """What is there by now stays until the end, so that collecting garbage in a test need not look through it."""
    gc.enable()
    freeze_modules(session)


def pytest_runtest_setup(item):
    """Freeze what an earlier file's tests have imported, once their fixtures are gone: every load of a model collects garbage, which takes
    0.2 s with Transformers' models."""
    stash = item.session.stash
    if item.path != stash.get(LAST_FILE, None) and len(sys.modules) > stash[NUM_FROZEN] + MANY_MODULES:
        freeze_modules(item.session)
    stash[LAST_FILE] = item.path


def freeze_modules(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
    session.stash[NUM_FROZEN] = len(sys.modules)


@pytest.fixture(autouse=True)
def check_blocks_when_idle(monkeypatch):
    """At the end of every run of every ``LLM`` in this process, the engine's books of KV blocks must agree."""
    from labinfer.engine.llm_engine import LLMEngine

    end_run = LLMEngine.end_run

    def check_and_end(engine):
        engine.scheduler.check_integrity()
        return end_run(engine)

    monkeypatch.setattr(LLMEngine, "end_run", check_and_end)


@pytest.fixture
def clock():
    """A clock that stands still until the test moves it."""
    from fake_clock import FakeClock

    return FakeClock()


@pytest.fixture
def add_part(monkeypatch):
    """Registers a part for one test."""
    from labinfer.base.registry import REGISTRY, RegistryEntry

    def add(kind: str, name: str, part, **details) -> None:
        monkeypatch.setitem(REGISTRY._entries[kind], name, RegistryEntry(part=part, details=details, origin="test"))

    return add


@pytest.fixture(scope="session")
def fake_device(tmp_path_factory) -> Callable[..., dict[str, str]]:
    """Takes a device's name and switches, and returns the environment of processes that have it; see ``tests/fake_device``."""
    from fake_device.build import build, install

    from labinfer.native.compiler import NoCompiler

    try:
        build()
    except NoCompiler as error:
        pytest.skip(f"the make-believe accelerator needs a C++ compiler: {error}")
    return functools.partial(install, tmp_path_factory.mktemp("fake-device"))
