"""DeepSeek-V3.2 and GLM-5: their sparse attention is computed densely, which is the same in contexts of ``index_topk`` tokens."""

from __future__ import annotations

import pytest
from checkpoints import make_checkpoint, transformers_greedy
from golden import PROMPTS, check_answers, greedy, recorded, relative_error

TOPK = 16


@pytest.mark.parametrize("kind", ["deepseek-v3.2", "glm-5"])
def test_longer_contexts_need_a_flag_and_differ_from_the_reference(kind, tmp_path, caplog):
    directory = make_checkpoint(tmp_path, kind, index_topk=TOPK)
    short, long = [PROMPTS[0], PROMPTS[4]], PROMPTS[3:4]
    references = transformers_greedy(directory, short, 8)
    with recorded(directory) as (llm, rows):
        assert llm.spec.max_model_len == TOPK
        assert f"sparse attention (index_topk {TOPK}) is computed densely" in caplog.text
        tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
        check_answers(greedy(llm, short, 8), rows, tokens, logits)
    (reference,) = transformers_greedy(directory, long, 1)
    with recorded(directory, max_model_len=64) as (llm, rows):
        greedy(llm, long, 1)
    assert relative_error(rows[tuple(long[0])], reference["logits"][0]) > 1e-3
