"""Quantised checkpoints over this world: the tokens of the same values stored plainly, in the layouts its size allows."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, mixed_prompts
from published_formats import PUBLISHED, write_published
from toy_format import write_toy

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
EXCLUDED = ["lm_head", "model.embed_tokens", "model.layers.2.self_attn.q_proj", "model.layers.1.mlp.down_proj"]


FORMATS = ("toy", "gptq-asym", "fp8")


@pytest.fixture(params=FORMATS)
def checkpoints(group, request):
    """(quantised, plain of the same values), made on rank 0 and seen by all ranks of this machine."""
    path = tempfile.mkdtemp(prefix="labinfer-formats-") if group.rank == 0 else ""
    root = Path(group.comm.all_gather_bytes(path.encode())[0].decode())
    if group.rank == 0:
        make_checkpoint(root / "quantised", "llama-untied")
        if request.param == "toy":
            write_toy(root / "quantised", root / "plain", EXCLUDED)
        else:
            write_published(root / "quantised", root / "plain", PUBLISHED[request.param])
    group.comm.barrier()
    yield root / "quantised", root / "plain"
    group.comm.barrier()
    if group.rank == 0:
        shutil.rmtree(root)


def test_quantised_checkpoint_gives_the_tokens_of_its_values(group, checkpoints):
    layouts = [{"tensor_parallel_size": group.size}, {"pipeline_parallel_size": group.size}][: min(2, group.size)]
    for layout in layouts:
        tokens, bytes_read = [], []
        for directory in checkpoints:
            llm = LLM.from_options(
                group, EngineOptions.from_flat({"model": str(directory), "quantization": "none", **layout})
            )
            outputs = llm.generate(mixed_prompts(5) if llm.is_rank0 else None, GREEDY)
            if llm.is_rank0:
                tokens.append([output.token_ids for output in outputs])
                bytes_read.append(sum(worker.weight_bytes_read for worker in llm.report.workers))
        if group.rank == 0:
            assert tokens[0] == tokens[1] and all(len(ids) == 12 for ids in tokens[0]), layout
            assert bytes_read[0] < 0.7 * bytes_read[1], layout  # it was really stored in fewer bits
