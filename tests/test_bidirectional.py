"""Models whose ``is_causal`` is false: vectors are Transformers', whatever runs beside them, and nothing is generated."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import CONFIGS, FAMILIES, mixed_prompts
from embedders import make_base_model, reference_vectors, worst_error

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError
from labinfer.base.plan import POOLINGS
from labinfer.models.registry import load_config
from labinfer.weights.hugging_face.pooling import MODES

PROMPTS = mixed_prompts()
SMALL = {"block_size": 4, "num_kv_blocks": 200, "threads": 1, "autotune": "off"}
SENTENCE_TRANSFORMERS_MODES = {ours: theirs for theirs, ours in MODES.items()}
SUPPORTED = (
    *("ministral3", "smollm3", "phi4-mini", "phi4-mini-long", "seed-oss", "glm4", "ernie4.5", "hunyuan"),
    *("ernie4.5-moe", "hunyuan-moe", "glm4-moe", "glm4-moe-groups", "minimax-m2", "granite", "granite-moe", "apertus"),
)
"""Kinds of checkpoints whose layers all have full attention."""
TOLERANCE = 1e-4


def make_bidirectional(directory: Path, kind: str) -> Path:
    return make_base_model(directory, kind, is_causal=False, tie_word_embeddings=True)


def is_supported(kind: str, directory: Path) -> bool:
    """Whether every layer of a kind has full attention; other kinds are refused."""
    try:
        return not load_config(make_bidirectional(directory, kind)).is_causal
    except UserError as error:
        assert "is_causal false needs full attention in every layer" in str(error)
        return False


@pytest.fixture(scope="module", params=["qwen2-tied", "llama-untied"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kind, tmp_path_factory):
    return make_bidirectional(tmp_path_factory.mktemp(kind), kind)


@pytest.mark.parametrize(
    "options", [{}, {"functions": "reference"}, {"max_num_batched_tokens": 90}, {"num_kv_blocks": 24}]
)
def test_vectors_are_those_of_transformers(checkpoint, options):
    """Twice, as a prefix found in the KV cache would be that of another prompt; also with less room than all prompts take, and with
    chunks smaller than a prompt."""
    with LLM(str(checkpoint), **SMALL | {"chunked_prefill_size": 7} | options) as llm:
        for pooling in POOLINGS:
            expected = reference_vectors(checkpoint, PROMPTS, SENTENCE_TRANSFORMERS_MODES[pooling], normalize=False)
            for _ in range(2):
                outputs = llm.embed(PROMPTS, pooling, normalize=False)
                assert worst_error([output.embedding for output in outputs], expected) < TOLERANCE
                assert not any(output.num_cached_tokens for output in outputs)


def test_first_token_depends_on_the_last(checkpoint):
    """So that the comparison above is one of masks."""
    with LLM(str(checkpoint), **SMALL) as llm:
        first, other = llm.embed([[5, 6, 7, 8], [5, 6, 7, 9]], "cls")
        assert first.embedding != pytest.approx(other.embedding, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_vectors_of_transformers_or_is_refused(family, tmp_path):
    assert is_supported(family, tmp_path) == (family in SUPPORTED)
    if family in SUPPORTED:
        with LLM(str(tmp_path), **SMALL) as llm:
            vectors = [output.embedding for output in llm.embed(PROMPTS, "mean", normalize=False)]
        assert worst_error(vectors, reference_vectors(tmp_path, PROMPTS, "mean", normalize=False)) < TOLERANCE


def test_generation_is_refused(checkpoint):
    with LLM(str(checkpoint), **SMALL) as llm:
        with pytest.raises(UserError, match=r"is bidirectional \(is_causal: false\).*request embeddings"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=2))
        assert len(llm.embed(PROMPTS)) == len(PROMPTS)


def test_context_is_that_of_a_step(checkpoint, caplog):
    with caplog.at_level("INFO"), LLM(str(checkpoint), **SMALL, max_num_batched_tokens=16) as llm:
        assert "limits the context length to 16 tokens; raise it with --max-num-batched-tokens" in caplog.text
        with pytest.raises(UserError, match=r"maximum context length is 16 tokens.*your prompt has 17 tokens"):
            llm.embed([[5] * 17])
        assert len(llm.embed([[5] * 16])) == 1


def test_sliding_window_is_refused(checkpoint):
    with pytest.raises(UserError, match="sliding_window needs a causal model"):
        LLM(str(checkpoint), **SMALL, sliding_window=8)


def test_draft_model_has_to_be_causal(checkpoint, kind, tmp_path):
    causal = tmp_path / "causal"
    make_base_model(causal, kind, tie_word_embeddings=True)
    with pytest.raises(UserError, match="the draft model .* is bidirectional"):
        LLM(str(causal), **SMALL, speculative_config={"model": str(checkpoint), "num_speculative_tokens": 2})


def test_families_with_other_mixers_are_refused(tmp_path):
    kinds = ("mistral", "gemma3", "gpt-oss", "deepseek-v3", "qwen3.5")
    assert [is_supported(kind, tmp_path / kind) for kind in kinds] == [False] * len(kinds)
    assert set(kinds) <= set(FAMILIES) <= set(CONFIGS)
