"""Shared memory without a launcher: ranks are threads. What needs processes is in tests/dist."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from labinfer.comm import shared_memory
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.segment import SegmentAddress, create_segment, open_segment
from labinfer.comm.shared_memory import share_memory
from labinfer.native import compiler

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def warnings(caplog, monkeypatch):
    """The texts of what is logged, whatever a command run by another test has set up."""
    monkeypatch.setattr(logging.getLogger("labinfer"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records]


@needs_compiler
@pytest.mark.parametrize("size", [2, 3])
def test_every_call_over_threads(size):
    def work(comm):
        comm.progress.oversubscribed = True
        shared = share_memory(comm)
        assert (shared.name, shared.rank, shared.size) == ("shared memory", comm.rank, size)
        total = shared.all_reduce(torch.full((3, 4), comm.rank + 1.0))
        column = shared.all_reduce(torch.full((6, 4), comm.rank + 1, dtype=torch.bfloat16)[:, 1])
        counts = shared.all_reduce(torch.tensor([comm.rank, 7]))  # not a type of the library's: by the carrier
        parts = shared.gather(torch.full((comm.rank + 1,), comm.rank), range(1, size + 1), root=1)
        return total.unique().tolist(), column.tolist(), counts.tolist(), parts and [part.tolist() for part in parts]

    ranks = range(size)
    everything = size * (size + 1) / 2
    for rank, found in enumerate(LocalCommunicator.run(size, work)):
        parts = [[part] * (part + 1) for part in ranks] if rank == 1 else None
        assert found == ([everything], [everything] * 6, [sum(ranks), 7 * size], parts)


@needs_compiler
@pytest.mark.parametrize("driver", ["shared_memory_threads.cpp", "ring_threads.cpp"])
def test_ranks_agree_on_processors_that_reorder(tmp_path, driver):
    """ThreadSanitizer finds every access that C++ does not promise to be in order, also where this processor keeps it."""
    source, program, probe = Path(__file__).with_name(driver), tmp_path / "threads", tmp_path / "probe.cpp"
    found = next(filter(None, map(shutil.which, compiler.COMPILERS)))
    command = [found, "-O1", "-std=c++17", "-fsanitize=thread", "-pthread", "-o", str(program)]
    probe.write_text("int main() {}")
    if subprocess.run([*command, str(probe)], capture_output=True).returncode:
        pytest.skip(f"{found} has no ThreadSanitizer")
    subprocess.run([*command, str(source)], check=True)
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    unfit, done = "unexpected memory mapping", None
    for personality in ([], ["setarch", "--addr-no-randomize"]):
        if (done is None or unfit in done.stderr) and (not personality or shutil.which(personality[0])):
            command = [*personality, str(program)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    if unfit in done.stderr or "personality" in done.stderr:
        pytest.skip("this kernel lays out memory as its ThreadSanitizer does not expect")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[:2000]


def test_group_of_one_shares_with_nobody():
    comm = LocalCommunicator()
    assert share_memory(comm) is comm


def test_without_a_compiler_the_transport_remains_and_one_line_says_why(monkeypatch, warnings):
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    assert LocalCommunicator.run(3, lambda comm: share_memory(comm) is comm) == [True] * 3
    assert warnings() == [
        "ranks 0-2 share no memory (rank 0: no C++ compiler found (no-such-compiler)); all-reduce falls back to local, "
        "which is slower"
    ]


@needs_compiler
def test_ranks_without_a_common_memory_keep_their_transport(monkeypatch, warnings):
    def elsewhere(address):
        return open_segment(SegmentAddress(address.path, "/memfd:another (deleted)", address.size))

    monkeypatch.setattr(shared_memory, "open_segment", elsewhere)
    assert LocalCommunicator.run(2, lambda comm: share_memory(comm) is comm) == [True] * 2
    assert len(warnings()) == 1 and warnings()[0].startswith("ranks 0-1 share no memory (rank 1: /proc/")


def test_segment_is_found_until_its_descriptor_is_closed():
    mine, descriptor, address = create_segment(5000)
    theirs = open_segment(address)
    mine[4999] = 7
    assert theirs[4999] == 7 and len(theirs) == 5000
    os.close(descriptor)
    with pytest.raises(OSError):
        open_segment(address)
