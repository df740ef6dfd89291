"""Packed weights from the cache over this world: each rank maps its own, and the tokens stay the same."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from layouts import GREEDY, layouts_for

from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.weights import packed_file
from labinfer.weights.weight_cache import WeightCache


@pytest.fixture
def cache(group, monkeypatch):
    """A cache that all ranks of this machine share."""
    path = tempfile.mkdtemp(prefix="labinfer-weights-") if group.rank == 0 else ""
    folder = Path(group.comm.all_gather_bytes(path.encode())[0].decode())
    monkeypatch.setattr(packed_file, "LEAST_BYTES", 0)
    cache = WeightCache(folder, 1 << 30, free_bytes=0)
    monkeypatch.setattr(WeightCache, "from_home", lambda gib: cache if gib else None)
    yield cache
    group.comm.barrier()
    if group.rank == 0:
        shutil.rmtree(folder)


def run(group, directory, prompts, layout) -> tuple[list[list[int]], int]:
    """Tokens and bytes read of the checkpoint, on rank 0."""
    options = EngineOptions.from_flat({"model": str(directory), "quantization": "int8", **layout})
    llm = LLM.from_options(group, options)
    outputs = llm.generate(prompts if llm.is_rank0 else None, GREEDY)
    for thread in threading.enumerate():
        if thread.name == "weight-cache":
            thread.join()
    group.comm.barrier()
    if not llm.is_rank0:
        return [], 0
    return [output.token_ids for output in outputs], sum(worker.weight_bytes_read for worker in llm.report.workers)


def test_second_start_maps_each_ranks_part(group, golden, cache):
    directory, prompts, _ = golden
    num_files = 0
    for layout in layouts_for(group.size)[:2]:
        first, second = (run(group, directory, prompts, layout) for _ in range(2))
        num_files += group.size
        group.comm.barrier()
        assert len(cache.files()) == num_files, layout
        if group.rank == 0:
            assert first[0] == second[0] and first[1] > 0 and second[1] == 0, layout
