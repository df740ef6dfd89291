"""gpt-oss through ``LLM`` in one process, against Transformers in fp32: tokens and logits in every way of the engine."""

from __future__ import annotations

import pytest
from golden import BEAM_PROMPTS, BEAMS, check_answers, golden, greedy, recorded

from labinfer import SamplingParams

KIND = "gpt-oss"


@pytest.mark.each_value
@pytest.mark.parametrize("functions", ["auto", "reference"])
@pytest.mark.parametrize("chunk", [1, 3, 16, 512])
def test_tokens_and_logits_are_those_of_transformers(chunk, functions):
    """Chunks shorter and longer than the window of 8 tokens."""
    with recorded(golden(KIND).directory, chunked_prefill_size=chunk, functions=(functions,)) as (llm, rows):
        check_answers(greedy(llm), rows, golden(KIND).tokens, golden(KIND).logits)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_no_token(mode):
    reference, swap = golden(KIND), {"swap_space": 0.002} if mode == "swap" else {}
    with recorded(reference.directory, num_kv_blocks=60, preemption_mode=mode, **swap) as (llm, rows):
        check_answers(greedy(llm), rows, reference.tokens, reference.logits)
        assert llm.report.counts["preemptions"] > 0 and (llm.report.counts["swaps"] > 0) == (mode == "swap")


def test_hits_change_no_token():
    reference = golden(KIND)
    with recorded(reference.directory) as (llm, rows):
        for _ in range(2):
            rows.clear()
            check_answers(greedy(llm), rows, reference.tokens, reference.logits)
        assert llm.report.counts["found"] > 0


def test_beams_are_those_of_transformers():
    with recorded(golden(KIND).directory) as (llm, _):
        outputs = llm.generate(BEAM_PROMPTS, SamplingParams(ignore_eos=True, n=BEAMS["num_beams"], **BEAMS))
    assert [[item.token_ids for item in output.completions] for output in outputs] == golden(KIND).beams
