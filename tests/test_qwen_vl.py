"""The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, under the published names and those of Transformers 5."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from checkpoints import CONFIGS, make_checkpoint, transformers_greedy
from golden import PROMPTS, check_answers, greedy, recorded
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from labinfer import LLM
from labinfer.base.errors import UserError

SOME = PROMPTS[2:4]
KINDS = ("qwen2-vl-pictures", "qwen2.5-vl-pictures", "qwen3-vl-pictures", "qwen3-vl-moe-pictures")


def turn(directory: Path, target: Path, kind: str) -> Path:
    """The other spelling of a checkpoint that Transformers wrote."""
    target.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((directory / name).read_bytes())
    tensors = load_file(directory / "model.safetensors")
    if kind == "qwen3-vl-moe-pictures":
        turned = {name: x.transpose(1, 2).contiguous() if ".mlp.experts." in name else x for name, x in tensors.items()}
    elif any(name.startswith("visual.") for name in tensors):
        turned = {
            name.replace("visual.", "model.visual.").replace("model.layers", "model.language_model.layers")
            .replace("model.embed", "model.language_model.embed").replace("model.norm", "model.language_model.norm"): x
            for name, x in tensors.items()
        }  # fmt: skip
    else:
        turned = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): x for name, x in tensors.items()}  # fmt: skip
    assert turned.keys() != tensors.keys() or kind.startswith("qwen3")
    save_file(turned, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_text_part_gives_the_logits_of_transformers(kind, tmp_path, caplog):
    directory = make_checkpoint(tmp_path / "written", kind)
    references = transformers_greedy(directory, SOME, 8, AutoModelForImageTextToText)
    tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
    with caplog.at_level(logging.INFO, "labinfer"), recorded(directory) as (llm, rows):
        check_answers(greedy(llm, SOME, 8), rows, tokens, logits)
    (line,) = [record.message for record in caplog.records if "not loaded" in record.message]
    assert "visual" in line
    with recorded(turn(directory, tmp_path / "turned", kind)) as (llm, rows):
        check_answers(greedy(llm, SOME, 8), rows, tokens, logits)


def test_experts_of_ambiguous_order_are_refused(tmp_path):
    config = CONFIGS["qwen3-vl-moe-pictures"]().text_config
    config.moe_intermediate_size = config.hidden_size // 2
    directory = make_checkpoint(tmp_path, "qwen3-vl-moe-pictures", text_config=config)
    shape = load_file(directory / "model.safetensors")["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape
    assert shape[1] == shape[2]
    with pytest.raises(UserError, match="may be input-major"):
        LLM(str(directory))
