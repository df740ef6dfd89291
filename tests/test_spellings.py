"""Mixtures and hybrids as checkpoints spell them: on the hub, by Transformers 5, with the experts of a layer in one tensor or apart."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from checkpoints import HYBRIDS, MIXTURES, make_checkpoint, randomize, transformers_greedy, write_tokenizer
from golden import PROMPTS, check_answers, golden, greedy, recorded
from published_configs import PUBLISHED, shrink
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from labinfer.models.registry import load_config

SOME = PROMPTS[2:4]


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the experts of a layer in two tensors, gates above ups, where each had its own."""
    parts = {name: tensor for name, tensor in tensors.items() if re.search(r"\.mlp\.experts\.\d", name)}
    stacked = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for prefix in sorted({name.partition(".mlp.experts.")[0] for name in parts}):
        own = {
            tuple(name.split(".")[-3:-1]): tensor
            for name, tensor in parts.items()
            if name.startswith(f"{prefix}.mlp.experts.")
        }
        experts = [str(number) for number in range(len(own) // 3)]
        both = [torch.cat([own[expert, "gate_proj"], own[expert, "up_proj"]]) for expert in experts]
        stacked[f"{prefix}.mlp.experts.gate_up_proj"] = torch.stack(both)
        down = [own[expert, "down_proj"] for expert in experts]
        stacked[f"{prefix}.mlp.experts.down_proj"] = torch.stack(down)
    return stacked


def older_config(values: dict) -> dict:
    """Keys as before Transformers 5: rope in two of them, ``torch_dtype``, and the number of experts as the hub has it."""
    values = dict(values)
    rope = dict(values.pop("rope_parameters"))
    values["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    values["rope_scaling"] = None if kind == "default" else {"type": kind} | rope
    if "dtype" in values:
        values["torch_dtype"] = values.pop("dtype")
    if values["model_type"] in ("qwen3_moe", "qwen2_moe", "qwen3_next", "qwen3_5_moe_text"):
        values["num_experts"] = values.pop("num_local_experts", None) or values["num_experts"]
    return values


def respell(directory: Path, target: Path) -> Path:
    """A checkpoint of Transformers 5 in older keys, its experts stored the other way."""
    target.mkdir()
    save_file(stack_experts(load_file(directory / "model.safetensors")), target / "model.safetensors")
    values = json.loads((directory / "config.json").read_text())
    nested = {key: older_config(values[key]) for key in ("text_config",) if key in values}
    (target / "config.json").write_text(json.dumps(values | nested if nested else older_config(values)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((directory / name).read_bytes())
    return target


def answers(directory: Path) -> tuple[list, dict]:
    with recorded(directory) as (llm, rows):
        return [output.token_ids for output in greedy(llm, SOME, 8)], dict(rows)


OLDER = sorted(
    {*MIXTURES, *HYBRIDS, "deepseek-v2", "deepseek-v3", "glm-4.7-flash", "qwen3.5-moe-pictures"} - {"gemma4-moe"}
)
"""Kinds that there were before Transformers 5."""


@pytest.mark.parametrize("kind", OLDER)
def test_every_spelling_gives_the_same_logits(kind, tmp_path):
    """To the last bit: the same numbers go the same way."""
    pictures = kind.endswith("pictures")
    directory = make_checkpoint(tmp_path / "newer", kind) if pictures else golden(kind).directory
    (tokens, rows), (same_tokens, same_rows) = answers(directory), answers(respell(directory, tmp_path / "older"))
    assert tokens == same_tokens and rows.keys() == same_rows.keys()
    assert all(torch.equal(rows[prefix], same_rows[prefix]) for prefix in rows)


# As published.

LEFT_OUT = {
    "Ernie4_5_MoeForCausalLM": "model.mtp_block.0.mlp.down_proj.weight",
    "Glm4MoeForCausalLM": "model.layers.4.eh_proj.weight",
    "DeepseekV32ForCausalLM": "model.layers.4.eh_proj.weight",
    "GlmMoeDsaForCausalLM": "model.layers.4.eh_proj.weight",
    "HYV3ForCausalLM": "model.layers.4.eh_proj.weight",
    "DeepseekV3ForCausalLM": "model.layers.4.eh_proj.weight",
    "Glm4MoeLiteForCausalLM": "model.layers.4.eh_proj.weight",
    "MiniMaxM2ForCausalLM": "model.layers.5.eh_proj.weight",
    "Qwen3NextForCausalLM": "mtp.fc.weight",
    "Qwen3_5ForConditionalGeneration": "mtp.fc.weight",
    "Qwen3_5MoeForConditionalGeneration": "mtp.layers.0.mlp.experts.gate_up_proj",
}
"""A tensor of what drafts tokens, by architecture."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = load_config(tmp_path)
    text = PUBLISHED[name].get("text_config", PUBLISHED[name])
    assert (config.num_layers, config.hidden_size) == (text["num_hidden_layers"], text["hidden_size"])
    assert (config.max_position, config.vocab_size) == (text["max_position_embeddings"], text["vocab_size"])
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_logits_of_transformers(name, tmp_path, caplog):
    """With small sizes, and tensors named as on the hub."""
    values = shrink(PUBLISHED[name])
    if values["model_type"] == "kimi_k2":  # which Transformers knows by its architecture's name only
        values["model_type"] = "deepseek_v3"
    (tmp_path / "config.json").write_text(json.dumps(values))
    torch.manual_seed(1)
    auto = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.from_pretrained(tmp_path))
    randomize(model)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if "vision_config" in values:
        tensors = stack_experts(tensors)
    (architecture,) = values["architectures"]
    if extra := LEFT_OUT.get(architecture):
        tensors |= {extra: torch.ones(2, 2), f"{extra}_scale": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(values))
    write_tokenizer(tmp_path)
    references = transformers_greedy(tmp_path, SOME, 8)
    with caplog.at_level(logging.INFO, "labinfer"), recorded(tmp_path) as (llm, rows):
        tokens, logits = [r["token_ids"] for r in references], torch.stack([r["logits"] for r in references])
        check_answers(greedy(llm, SOME, 8), rows, tokens, logits)
    lines = [record.message for record in caplog.records if "not loaded" in record.message]
    assert len(lines) == bool(extra) and all("2 tensors of" in line or "model.visual" in line for line in lines)


@pytest.mark.parametrize("as_published", [False, True])
def test_text_part_of_kimi(as_published, tmp_path, caplog):
    """In the architecture's name of Transformers, and of the hub; with the hub's tensors, of which Transformers writes layers as
    blocks."""
    directory = make_checkpoint(tmp_path, "kimi-k2.5-pictures")
    references = transformers_greedy(directory, SOME, 8, AutoModelForImageTextToText)
    tensors = load_file(directory / "model.safetensors")
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): x for name, x in tensors.items()
    }
    assert {
        "language_model.model.layers.3.self_attn.kv_b_proj.weight",
        "language_model.lm_head.weight",
    } < tensors.keys()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if as_published:
        values = json.loads((directory / "config.json").read_text())
        values |= {"architectures": ["KimiK25ForConditionalGeneration"]}
        values["text_config"] |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
        (directory / "config.json").write_text(json.dumps(values))
    with caplog.at_level(logging.INFO, "labinfer"), recorded(directory) as (llm, rows):
        tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
        check_answers(greedy(llm, SOME, 8), rows, tokens, logits)
    (line,) = [record.message for record in caplog.records if "not loaded" in record.message]
    assert "vision_tower" in line and "mm_projector" in line


@pytest.mark.parametrize("kind", ["ministral3-pictures", "mistral3-pictures"])
def test_text_part_of_mistral(kind, tmp_path, caplog):
    """The output head is beside the text model, not beside the whole."""
    directory = make_checkpoint(tmp_path, kind)
    tensors = load_file(directory / "model.safetensors")
    assert ("language_model.lm_head.weight" in tensors) == (kind == "ministral3-pictures")
    references = transformers_greedy(directory, SOME, 8, AutoModelForImageTextToText)
    with caplog.at_level(logging.INFO, "labinfer"), recorded(directory) as (llm, rows):
        tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
        check_answers(greedy(llm, SOME, 8), rows, tokens, logits)
    (line,) = [record.message for record in caplog.records if "not loaded" in record.message]
    assert "vision_tower" in line and "multi_modal_projector" in line
