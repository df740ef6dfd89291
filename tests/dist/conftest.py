"""One process group for all tests here, whatever started it: the same tests run alone, under mpirun -n N and under torchrun."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, mixed_prompts, transformers_greedy

from labinfer.base.config import EngineOptions, ParallelOptions, RuntimeOptions
from labinfer.comm.group.failure import end_process_with
from labinfer.comm.group.rank_group import join_group
from labinfer.comm.spmd.environment import detect


@pytest.fixture(scope="session")
def group():
    options = EngineOptions(parallel=ParallelOptions(device=("cpu",)), runtime=RuntimeOptions(timeout=60.0))
    group = join_group(detect(), options)
    yield group
    group.close()


@pytest.fixture(scope="session")
def golden(group):
    """(checkpoint directory, prompts, Transformers' tokens), made on rank 0 and seen by all ranks of this machine."""
    path = tempfile.mkdtemp(prefix="labinfer-dist-") if group.rank == 0 else ""
    directory = Path(group.comm.all_gather_bytes(path.encode())[0].decode())
    prompts = mixed_prompts(5)
    tokens = None
    if group.rank == 0:
        make_checkpoint(directory, "qwen2-tied")
        tokens = [answer["token_ids"] for answer in transformers_greedy(directory, prompts, 12)]
    group.comm.barrier()
    yield directory, prompts, tokens
    group.comm.barrier()
    if group.rank == 0:
        shutil.rmtree(directory)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that fails on one rank leaves the others waiting: end them all, with this rank's account."""
    outcome = yield
    group = item.funcargs.get("group")
    if (
        call.excinfo is not None
        and not call.excinfo.errisinstance(pytest.skip.Exception)
        and group is not None
        and group.size > 1
    ):
        report = outcome.get_result()
        os.write(2, f"{item.nodeid} failed on rank {group.rank}\n{report.longreprtext}\n".encode())
        end_process_with(call.excinfo.value, group)
