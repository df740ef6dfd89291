"""Drafts of the model's MTP layer on every layout: the tokens are those without, and as many drafts are right as on one rank."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, mixed_prompts
from layouts import layouts_for
from mtp_checkpoints import add_mtp

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.comm.spmd.environment import detect


@pytest.fixture(scope="module")
def checkpoint(group, kind):
    """With heads of its own for embedding and output, or one for both; made on rank 0 and seen by all ranks of this machine."""
    path = tempfile.mkdtemp(prefix="labinfer-mtp-") if group.rank == 0 else ""
    directory = Path(group.comm.all_gather_bytes(path.encode())[0].decode()) / "model"
    if group.rank == 0:
        make_checkpoint(directory, kind)
        add_mtp(directory, kind, noise=0.0)
    group.comm.barrier()
    yield directory
    group.comm.barrier()
    if group.rank == 0:
        shutil.rmtree(directory.parent)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", layouts_for(detect().world_size), ids=str)
@pytest.mark.parametrize(
    "kind", ["deepseek-v3", "qwen3.5-pictures", pytest.param("qwen3-next-moe", marks=pytest.mark.slow)], scope="module"
)
def test_answers_are_those_without_drafts(group, checkpoint, layout):
    prompts = mixed_prompts(6)
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9 * (index % 2), seed=index)
        for index in range(len(prompts))
    ]
    answers = []
    for config in (None, {"method": "mtp", "num_speculative_tokens": 3}):
        flat = {"model": str(checkpoint), "block_size": 4, "num_kv_blocks": 400, "speculative_config": config}
        llm = LLM.from_options(group, EngineOptions.from_flat(flat | layout))
        outputs = llm.generate(prompts, params)
        answers.append([output.token_ids for output in outputs or []])
        counts = llm.report.counts if llm.is_rank0 else None
    assert answers[0] == answers[1]
    if counts is not None:
        assert counts["drafted"] > 13 * len(prompts)
        assert counts["accepted"] > 0.98 * counts["drafted"]
