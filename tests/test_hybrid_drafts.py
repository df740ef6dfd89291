"""Drafted tokens of models whose layers keep states: every answer is that of a run without them."""

from __future__ import annotations

import random

import pytest
from checkpoints import HYBRIDS, make_checkpoint
from drafting import draft_with
from test_drafts import PARAMS, PROMPTS, AnswerProposer, assert_same

from labinfer import LLM

OPTIONS = {"block_size": 4, "threads": 1, "snapshot_interval": 20}


@pytest.fixture(scope="module", params=HYBRIDS)
def checkpoint(request, tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("hybrid") / "model", request.param))


@pytest.fixture(scope="module")
def alone(checkpoint):
    """The answers to each request, one after another with nothing in the cache."""
    with LLM(checkpoint, num_kv_blocks=400, enable_prefix_caching=False, **OPTIONS) as llm:
        return [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.each_value
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 400},
        {"num_kv_blocks": 40, "preemption_mode": "swap", "swap_space": 0.01, "chunked_prefill_size": 5},
        {"num_kv_blocks": 400, "max_num_seqs": 3, "enable_prefix_caching": False, "functions": ("reference",)},
    ],
    ids=["cached", "swap", "reference"],
)
def test_answers_do_not_depend_on_drafts(checkpoint, alone, options, share):
    with LLM(checkpoint, **OPTIONS, **options) as llm:
        draft_with(llm, AnswerProposer(alone, random.Random(0), share))
        for _ in range(2):  # the second run finds snapshots of the first
            for ours, theirs in zip(llm.generate(PROMPTS, PARAMS), alone, strict=True):
                assert_same(ours, theirs)
            counts = llm.report.counts
            assert counts["drafted"] > 60
            assert counts["accepted"] > 0 or share == 0.0
            assert counts["preemptions"] > 0 or options["num_kv_blocks"] > 40
            assert share < 1.0 or counts["accepted"] == counts["drafted"]


def test_hybrid_model_drafts_for_itself(checkpoint, alone):
    """Nearly all that it drafts is right; the masks of forms and the penalties hold for drafts, too."""
    drafter = {"model": checkpoint, "num_speculative_tokens": 3}
    with LLM(checkpoint, num_kv_blocks=400, speculative_config=drafter, **OPTIONS) as llm:
        for ours, theirs in zip(llm.generate(PROMPTS, PARAMS), alone, strict=True):
            assert_same(ours, theirs)
        counts, proposer = llm.report.counts, llm.engine.scheduler.drafts.proposer
        assert 60 < counts["drafted"] < 1.1 * counts["accepted"]
        assert proposer.tables.is_idle and proposer.tables.states is not None
