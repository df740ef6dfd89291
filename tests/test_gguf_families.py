"""GGUF files of every family beside those of ``test_gguf.py``: Transformers' tokens and logprobs on the original weights."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import LONGROPE, make_checkpoint, mixed_prompts, transformers_greedy, transformers_logprobs
from gguf_files import write_gguf

from labinfer import LLM, SamplingParams

PERIOD = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
ONE_BASE = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 128},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
LONG = LONGROPE | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 2}
KINDS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "mixtral": {"sliding_window": None},
    "granite": {},
    "granite-moe": {},
    "exaone4": {},
    "gemma4": {},
    "gemma4-tied-values": {},
    "gemma4-moe": {},
    "gemma4-layer-inputs": {},
    "gemma4-shared-caches": {},
    "glm4": {},
    "glm4-moe": {},
    "glm4-moe-groups": {},
    "glm-4.7-flash": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "minimax-m2": {},
    "qwen3-next-moe": {**PERIOD, "mlp_only_layers": []},
    "phi3": {},
    "phi4-mini": {},
    "phi4-mini-long": {"original_max_position_embeddings": 2, "rope_parameters": LONG},
    "hunyuan": {},
    "hunyuan-moe": {"moe_topk": 3},
    "ernie4.5": {},
    "ernie4.5-moe": {},
    "seed-oss": {},
    "olmo3": {"rope_parameters": ONE_BASE},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "mistral": {"sliding_window": None},
    "ministral3": {},
}
"""Kinds of checkpoints, with changes to what files cannot say."""
FUSED = ("gemma4-moe", "minimax-m2", "qwen3-next-moe")
"""Kinds of which gates and ups of experts are written as one tensor."""
SLOW = (
    *("gemma2", "mixtral", "granite", "granite-moe", "exaone4"),
    *("gemma4", "gemma4-tied-values", "glm4-moe-groups", "glm-4.7-flash", "phi4-mini-long", "mistral"),
)
"""Kinds whose differences from files of others are covered by faster tests, or by other kinds."""
PROMPTS = mixed_prompts(4)[1:]
NUM_TOKENS = 8


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in KINDS]
)
def test_file_gives_transformers_tokens_and_logprobs(tmp_path, kind):
    directory = make_checkpoint(tmp_path / "model", kind, **KINDS[kind])
    path = write_gguf(directory, tmp_path / "model.gguf", fused=kind in FUSED)
    expected = [answer["token_ids"] for answer in transformers_greedy(directory, PROMPTS, NUM_TOKENS)]
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)
    with LLM(str(path), dtype="float32", num_kv_blocks=100, threads=1) as llm:
        outputs = llm.generate(PROMPTS, params)
    assert [output.completions[0].token_ids for output in outputs] == expected
    found = [one.logprob for output in outputs for one in output.prompt_logprobs]
    assert found == pytest.approx(transformers_logprobs(directory, PROMPTS), rel=1e-4, abs=1e-4)
