"""Captured steps with drafts, of every family: the same bits as where nothing is captured, wherever in the answer they are."""

from __future__ import annotations

import random

import pytest
from checkpoints import FAMILIES, LATENTS, make_checkpoint
from test_drafts import AnswerProposer

from labinfer import LLM, SamplingParams
from labinfer.worker.step_graphs import CapturedStep, StepGraphs

PROMPT = [7, 3, 9, 11, 5, 4, 8]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)

UNCAPTURED = {"ministral3", "olmo3", "minimax-m2", *LATENTS}
"""Their layers have something between functions that a graph cannot repeat."""
SAMPLE = {
    ("qwen2-windows", "float32"),
    ("gemma4-moe", "bfloat16"),
    ("deepseek-v3", "bfloat16"),
    ("qwen3.5", "bfloat16"),
}


class WithLength(AnswerProposer):
    """Drafts of one length, so that steps come again at other positions."""

    def _propose(self, sequence, limit):
        answer = self.outputs[0].completions[0].token_ids
        right = answer[sequence.num_output_tokens :][: min(limit, 3)]
        return [token if self.draw.random() < self.share else self.draw.randrange(100) for token in right]


def captured_rows(graphs: StepGraphs) -> set[int]:
    """Rows of the steps that are replayed as one."""
    return {rows for (_, rows, *_), step in graphs._steps.items() if isinstance(step, CapturedStep)}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if (kind, dtype) in SAMPLE else pytest.mark.slow)
        for kind in ("qwen2-windows", "llama-untied", *FAMILIES)
        for dtype in ("bfloat16", "float32")
    ],
)
def test_captured_steps_with_drafts_give_the_same_bits(tmp_path, kind, dtype):
    options = {"num_kv_blocks": 200, "block_size": 4, "threads": 1, "enable_prefix_caching": False, "autotune": False}
    answers = []
    with LLM(str(make_checkpoint(tmp_path / "model", kind)), dtype=dtype, **options) as llm:
        runner, drafts = llm._parts.worker.runner, llm.engine.scheduler.drafts
        parts = [runner._layers, *runner._heads.values()]
        capture = runner._layers._capture
        assert capture is not None
        expected = llm.generate([PROMPT], PARAMS)
        for chosen in (None, capture):
            for part in parts:
                part._capture = chosen
                part._steps.clear()
            drafts.proposer = WithLength(expected, random.Random(0), 0.8)
            (output,) = llm.generate([PROMPT], PARAMS)
            assert llm.report.counts["drafted"] > llm.report.counts["accepted"] > 0
            answers.append([(item.token_id, item.logprob) for item in output.completions[0].logprobs])
        rows = captured_rows(runner._layers)
        assert (max(rows, default=0) > 3) == (kind not in UNCAPTURED)
        assert max(captured_rows(runner._heads[False]), default=0) > 3 or kind in UNCAPTURED
    assert answers[0] == answers[1]
