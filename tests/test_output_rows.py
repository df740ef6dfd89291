"""The last layer computes rows that somebody asks for, and the same tokens come."""

from __future__ import annotations

import pytest
from golden import golden

from labinfer import LLM, SamplingParams
from labinfer.models.decoder import DecoderLayer

PROMPTS = [[7, 3, 9, 11, 5] * 8, [4, 8, 15, 16, 23, 42]]


@pytest.fixture
def rows(monkeypatch) -> list[tuple[int, int]]:
    """Rows that each call of a layer is given and gives."""
    calls, forward = [], DecoderLayer.forward

    def note(self, hidden_TD, *others, **named):
        out = forward(self, hidden_TD, *others, **named)
        calls.append((len(hidden_TD), len(out[0])))
        return out

    monkeypatch.setattr(DecoderLayer, "forward", note)
    return calls


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["qwen2-tied", "glm4-moe", "olmo3", "gemma3", "qwen3.5"])
@pytest.mark.parametrize("chunk", [0, 16])
def test_only_sampled_rows_leave_the_last_layer(rows, family, chunk):
    options = {"chunked_prefill_size": chunk} if chunk else {}
    with LLM(golden(family).directory, dtype="float32", num_kv_blocks=64, threads=1, **options) as llm:
        num_layers = llm.layout.config.num_layers
        llm._parts.worker.runner._layers._capture = None  # captured steps call no layer
        rows.clear()
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
        pruned = list(rows)
        rows.clear()
        whole = llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=0))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in whole]
    last = [given for index, given in enumerate(pruned) if index % num_layers == num_layers - 1]
    assert all(given == out for index, (given, out) in enumerate(pruned) if index % num_layers < num_layers - 1)
    assert sum(given for given, _ in last) >= 46, "all tokens go into the cache"
    assert sum(out for _, out in last) == 2 * 4
    assert any(given == out > 1 for given, out in rows), "measured prompts need all rows"
