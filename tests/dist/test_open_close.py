"""Opening and closing an ``LLM`` again and again leaves threads, descriptors and memory as they were, on every rank."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
from layouts import layouts_for

from labinfer import LLM, SamplingParams
from labinfer.comm.spmd.machine import private_memory

WARM_UP = 4
"""Rounds after which nothing grows any more."""
MOST_BYTES = 8 << 20
"""Growth of memory that is none: allocators keep some."""


def threads_and_files(before: list[int]) -> list[int]:
    """Numbers of this process's threads and open files, once they are as ``before``, or after a second: a health channel's thread
    ends when it has read the other ranks' goodbyes."""
    deadline = time.monotonic() + 1.0
    while True:
        counts = [len(list(Path("/proc/self", name).iterdir())) for name in ("task", "fd")]
        if counts == before or time.monotonic() > deadline:
            return counts
        time.sleep(0.01)


@pytest.mark.parametrize("num_rounds", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_llms_that_are_closed_leave_nothing_behind(group, golden, num_rounds):
    directory, prompts, _ = golden
    layout, counts, memory = layouts_for(group.size)[-1], [], []
    for _ in range(num_rounds):
        with LLM(directory, num_kv_blocks=64, threads=1, timeout=60.0, **layout) as llm:
            llm.generate(prompts[0] if llm.is_rank0 else None, SamplingParams(max_tokens=2))
        del llm
        gc.collect()
        group.comm.barrier()
        counts.append(threads_and_files(counts[-1] if counts else []))
        memory.append(private_memory())
    assert counts[-1] == counts[WARM_UP], counts
    assert memory[-1] - memory[WARM_UP] < MOST_BYTES, memory
