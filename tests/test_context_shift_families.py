"""Context shifts of families with tables of rotation by layer, windows or sinks; others refuse one at the start."""

from __future__ import annotations

import pytest
from checkpoints import SHARED_CACHES, make_checkpoint, mixed_prompts
from endless import EndlessReference

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError


@pytest.mark.parametrize("kind", ["gemma3", "gpt-oss", "gemma4", SHARED_CACHES])
def test_endless_context_is_that_of_transformers_cache(kind, tmp_path):
    """Two shifts of 16 tokens each, beside windows of 8; the first 8 tokens stay."""
    checkpoint, prompt = make_checkpoint(tmp_path / "model", kind), mixed_prompts()[2]
    tokens, logprobs = EndlessReference(checkpoint, 42, 8, 16).generate(prompt, 60)
    options = {"max_model_len": 42, "context_shift": True, "keep": 5, "block_size": 4}
    with LLM(str(checkpoint), num_kv_blocks=60, **options) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0))
    assert output.token_ids == tokens
    assert [one.logprob for one in output.completions[0].logprobs] == pytest.approx(logprobs, abs=1e-3)


def test_context_shift_is_refused_for_keys_that_are_normalised_after_rotation(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "hunyuan")
    with pytest.raises(
        UserError, match="^context_shift is not supported for this model .*keys that cannot be re-rotated"
    ):
        LLM(str(directory), context_shift=True)
