"""Classifiers and rerankers over this world, in the layouts its size allows: the scores of Transformers' own classes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from checkpoints import mixed_prompts
from classifiers import PAD, classifier_logits, make_classifier, make_reranker, token_shares
from layouts import layouts_for

from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions

TOLERANCE = 1e-5
PROMPTS = [*mixed_prompts(4), [7, 8, 9, PAD, PAD]]
OPTIONS = {"block_size": 4, "num_kv_blocks": 300, "chunked_prefill_size": 7}


@pytest.fixture(scope="module")
def directories(group):
    """A classifier and a reranker, made on rank 0."""
    path = tempfile.mkdtemp(prefix="labinfer-scores-") if group.rank == 0 else ""
    directory = Path(group.comm.all_gather_bytes(path.encode())[0].decode())
    if group.rank == 0:
        make_classifier(directory / "classifier", "qwen3", 3)
        make_reranker(directory / "reranker")
    group.comm.barrier()
    yield directory / "classifier", directory / "reranker"
    group.comm.barrier()
    if group.rank == 0:
        shutil.rmtree(directory)


def build(group, directory: Path, **options) -> LLM:
    return LLM.from_options(group, EngineOptions.from_flat({"model": str(directory)} | OPTIONS | options))


def test_logits_are_those_of_transformers(group, directories):
    expected = classifier_logits(directories[0], PROMPTS) if group.rank == 0 else None
    for layout in layouts_for(group.size):
        outputs = build(group, directories[0], **layout).classify(PROMPTS, use_activation=False)
        if expected is None:
            assert outputs is None
            continue
        for output, logits in zip(outputs, expected, strict=True):
            assert output.probs == pytest.approx(logits, abs=TOLERANCE), layout


def test_reranker_reads_two_rows_of_a_head_that_is_sharded(group, directories):
    for layout in layouts_for(group.size):
        llm = build(group, directories[1], reranker="qwen3", **layout)
        outputs = llm.score("the fox", ["a lazy dog", "world"])
        if not llm.is_rank0:
            continue
        ids = tuple(llm.tokenizer.encode(text)[0] for text in ("yes", "no"))
        shares = token_shares(directories[1], [output.prompt_token_ids for output in outputs], ids)
        assert [output.score for output in outputs] == pytest.approx(shares, abs=1e-6), layout
