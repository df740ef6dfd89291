"""Captured steps of batches, of every family: the same bits as where nothing is captured, while sequences end."""

from __future__ import annotations

import pytest
from checkpoints import FAMILIES, make_checkpoint
from test_captured_drafts import UNCAPTURED, captured_rows

from labinfer import LLM, SamplingParams

PROMPTS = [[7, 3, 9, 11, 5, 4, 8][: 1 + index % 7] for index in range(12)]
PARAMS = [SamplingParams(max_tokens=6 + 2 * index, ignore_eos=True, logprobs=0) for index in range(12)]
SAMPLE = {("qwen2-windows", "float32"), ("qwen3-moe", "bfloat16"), ("gemma3", "bfloat16"), ("qwen3.5", "float32")}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if (kind, dtype) in SAMPLE else pytest.mark.slow)
        for kind in ("qwen2-windows", "llama-untied", *FAMILIES)
        for dtype in ("bfloat16", "float32")
    ],
)
def test_captured_batches_give_the_same_bits(tmp_path, kind, dtype):
    options = {"num_kv_blocks": 200, "block_size": 4, "threads": 2, "enable_prefix_caching": False, "autotune": False}
    answers = []
    with LLM(str(make_checkpoint(tmp_path / "model", kind)), dtype=dtype, **options) as llm:
        runner = llm._parts.worker.runner
        parts = [runner._layers, *runner._heads.values()]
        capture = runner._layers._capture
        assert capture is not None
        for chosen in (None, capture):
            for part in parts:
                part._capture = chosen
            outputs = llm.generate(PROMPTS, PARAMS)
            answers.append([[(t.token_id, t.logprob) for t in out.completions[0].logprobs] for out in outputs])
        rows = captured_rows(runner._layers)
    assert (len(rows) == len(PROMPTS)) == (kind not in UNCAPTURED), rows
    assert answers[0] == answers[1]
