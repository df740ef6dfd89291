"""Captured steps with drafts, of every family: the same bits as where nothing is captured, wherever in the answer they are."""

from __future__ import annotations

import random

from captured_steps import UNCAPTURED, captured_rows, families, launch, without_and_with_capture
from drafting import draft_with
from test_drafts import AnswerProposer

from labinfer import SamplingParams

PROMPT = [7, 3, 9, 11, 5, 4, 8]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)

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


@families(SAMPLE)
def test_captured_steps_with_drafts_give_the_same_bits(tmp_path, kind, dtype):
    answers = []
    with launch(tmp_path, kind, dtype, threads=1) as llm:
        runner = llm._parts.worker.runner
        expected = llm.generate([PROMPT], PARAMS)
        for _ in without_and_with_capture(llm):
            draft_with(llm, WithLength(expected, random.Random(0), 0.8))
            (output,) = llm.generate([PROMPT], PARAMS)
            assert llm.report.counts["drafted"] > llm.report.counts["accepted"] > 0
            answers.append([(item.token_id, item.logprob) for item in output.completions[0].logprobs])
        rows = captured_rows(runner._layers)
        assert (max(rows, default=0) > 3) == (kind not in UNCAPTURED)
        assert max(captured_rows(runner._head), default=0) > 3 or kind in UNCAPTURED
    assert answers[0] == answers[1]
