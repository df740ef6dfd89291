"""Captured steps of batches, of every family: the same bits as where nothing is captured, while sequences end."""

from __future__ import annotations

from captured_steps import UNCAPTURED, captured_rows, families, launch, without_and_with_capture

from labinfer import SamplingParams

PROMPTS = [[7, 3, 9, 11, 5, 4, 8][: 1 + index % 7] for index in range(12)]
PARAMS = [SamplingParams(max_tokens=6 + 2 * index, ignore_eos=True, logprobs=0) for index in range(12)]
SAMPLE = {("qwen2-windows", "float32"), ("qwen3-moe", "bfloat16"), ("gemma3", "bfloat16"), ("qwen3.5", "float32")}


@families(SAMPLE)
def test_captured_batches_give_the_same_bits(tmp_path, kind, dtype):
    answers = []
    with launch(tmp_path, kind, dtype, threads=2) as llm:
        for _ in without_and_with_capture(llm):
            outputs = llm.generate(PROMPTS, PARAMS)
            answers.append([[(t.token_id, t.logprob) for t in out.completions[0].logprobs] for out in outputs])
        rows = captured_rows(llm._parts.worker.runner._layers)
    assert (len(rows) == len(PROMPTS)) == (kind not in UNCAPTURED), rows
    assert answers[0] == answers[1]
