"""Checkpoints of base models and of published embedders: their vectors are Transformers', and nothing else is made up."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint, mixed_prompts, transformers_greedy
from embedders import drop_tensors, make_base_model, reference_vectors, worst_error, write_modules
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError
from labinfer.base.kinds import MODEL_FAMILIES
from labinfer.models.architectures import base_models
from labinfer.models.registry import load_config

PROMPTS = mixed_prompts(5)
SMALL = {"block_size": 4, "num_kv_blocks": 200, "threads": 1, "autotune": "off"}
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
TOLERANCE = 1e-5
FAMILY_TOLERANCE = 1e-4
"""That of every comparison with Transformers: routers and long sums of random weights amplify rounding."""
QUICK = ("qwen3", "llama-untied", "gemma3-pictures", "qwen3.5-pictures", "deepseek-v3", "phi3")
UNNAMED = ("kimi-k2.5", "minimax-m3", "step3")
"""Kinds of which no base model has a name."""
KINDS = [
    pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow)
    for kind in CONFIGS
    if not kind.startswith(UNNAMED)
]


def embed(directory, *pooling, **options) -> list[list[float]]:
    with LLM(str(directory), **SMALL) as llm:
        return [output.embedding for output in llm.embed(PROMPTS, *pooling, **options)]


@pytest.mark.parametrize("kind", KINDS)
def test_base_model_gives_the_vectors_of_transformers(kind, tmp_path):
    directory = make_base_model(tmp_path, kind)
    expected = reference_vectors(directory, PROMPTS, "lasttoken", normalize=False)
    assert worst_error(embed(directory, normalize=False), expected) < FAMILY_TOLERANCE


def test_base_models_are_those_of_transformers():
    """Of every class that Transformers has a base model for, but those of ``UNNAMED``."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    known = {
        MODEL_MAPPING_NAMES[kind]
        for kind, name in classes.items()
        if name in MODEL_FAMILIES and kind in MODEL_MAPPING_NAMES
    }
    assert set(base_models()) == known - {"Kimi_K25Model", "MiniMaxM3VLModel", "MiniMaxM3VLTextModel", "Step3p7Model"}


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_qwen3_embedding_as_it_is_published(architecture, tmp_path):
    """Its names lack ``model.``, and the larger ones have neither an output head nor a tied one."""
    directory = make_base_model(tmp_path, "qwen3", architectures=[architecture], tie_word_embeddings=False)
    write_modules(directory)
    expected = reference_vectors(directory, PROMPTS, "lasttoken", normalize=True)
    assert worst_error(embed(directory), expected) < TOLERANCE
    with LLM(str(directory), **SMALL) as llm:
        with pytest.raises(UserError, match=r"no output head \(lm_head\).*request embeddings"):
            llm.generate(PROMPTS, GREEDY)
        assert worst_error([output.embedding for output in llm.embed(PROMPTS)], expected) < TOLERANCE


def test_tied_head_of_a_base_model_generates_as_in_transformers(tmp_path):
    directory = make_base_model(tmp_path, "qwen2-tied")
    expected = [result["token_ids"] for result in transformers_greedy(directory, PROMPTS, GREEDY.max_tokens)]
    with LLM(str(directory), **SMALL) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected


def test_causal_model_whose_head_is_missing_gives_vectors_only_and_says_so(tmp_path, caplog):
    directory = make_checkpoint(tmp_path, "llama-untied")
    expected = reference_vectors(directory, PROMPTS, "lasttoken", normalize=False)
    assert load_config(directory).has_head
    drop_tensors(directory, "lm_head.weight")
    config = load_config(directory)
    assert not config.has_head and config.pooling.is_embedder
    with caplog.at_level("WARNING", logger="labinfer"):
        assert worst_error(embed(directory, normalize=False), expected) < TOLERANCE
    told = [record.message for record in caplog.records if "no output head (lm_head)" in record.message]
    assert len(told) == 1 and "only embeddings work" in told[0]
    assert load_config(write_modules(directory)).notes == ()


def test_model_without_a_head_cannot_draft(tmp_path):
    model = make_checkpoint(tmp_path / "model", "llama-untied")
    drafter = make_base_model(tmp_path / "drafter", "llama-untied")
    with pytest.raises(UserError, match=r"the draft model .* has no output head \(lm_head\)"):
        LLM(str(model), **SMALL, speculative_config={"model": str(drafter), "num_speculative_tokens": 2})


def test_tensors_are_ignored_by_their_names_and_told(tmp_path, caplog):
    directory = make_checkpoint(tmp_path, "llama-untied")
    with LLM(str(directory), **SMALL) as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    tensors = load_file(directory / "model.safetensors")
    extra = {f"aux_head.{part}.weight": torch.ones(3) for part in ("left", "right")}
    save_file(tensors | extra, directory / "model.safetensors")
    with pytest.raises(
        UserError, match=r"has tensor aux_head.left.weight and 1 more.*ignore_tensors 'aux_head.left.weight'"
    ):
        LLM(str(directory), **SMALL)
    with caplog.at_level("INFO"), LLM(str(directory), **SMALL, ignore_tensors=["aux_head.*"]) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
    told = [message for message in caplog.messages if "not loaded" in message]
    assert told == ["--ignore-tensors: 2 tensors are not loaded: aux_head.left.weight, aux_head.right.weight"]


@pytest.mark.pairwise
@pytest.mark.parametrize("old", [True, False], ids=["old keys", "new keys"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", ["lasttoken", "mean", "cls"])
def test_pooling_and_length_are_those_of_the_files(mode, normalize, old, tmp_path):
    directory = write_modules(make_base_model(tmp_path, "qwen3"), mode, normalize=normalize, old=old)
    expected = reference_vectors(directory, PROMPTS, mode, normalize)
    assert worst_error(embed(directory), expected) < TOLERANCE
    assert worst_error(embed(directory, "mean"), reference_vectors(directory, PROMPTS, "mean", normalize)) < TOLERANCE


def test_pooling_that_is_not_supported_is_refused_by_name_unless_the_caller_names_one(tmp_path, caplog):
    directory = write_modules(make_base_model(tmp_path, "qwen3"), "max")
    with LLM(str(directory), **SMALL) as llm:
        assert any("asks for pooling max" in message for message in caplog.messages)
        with pytest.raises(UserError, match=r"1_Pooling/config.json asks for pooling max.*choose one: last, mean, cls"):
            llm.embed(PROMPTS)
        vectors = [output.embedding for output in llm.embed(PROMPTS, "mean")]
    assert worst_error(vectors, reference_vectors(directory, PROMPTS, "mean", normalize=True)) < TOLERANCE


def test_files_of_pooling_that_are_broken_are_refused(tmp_path):
    directory = write_modules(make_base_model(tmp_path, "qwen3"))
    modules = json.loads((directory / "modules.json").read_text())
    modules[1]["path"] = "../other"
    (directory / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match="modules.json: path should name a folder"):
        load_config(directory)
    (directory / "modules.json").write_text("{}")
    with pytest.raises(UserError, match="modules.json is not a JSON list"):
        load_config(directory)
