"""Gemma 3 as it is spelt on the hub and beside what sees pictures, and its compiled steps."""

from __future__ import annotations

import json
import logging

import pytest
from checkpoints import make_checkpoint, transformers_greedy
from golden import PROMPTS, check_answers, check_captured, golden, greedy, recorded
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from labinfer.base.errors import UserError
from labinfer.models.registry import load_config

SOME = PROMPTS[2:4]
NESTED = {
    "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "12b": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "27b": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}
"""What ``text_config`` of the published models says beside ``HUB``."""
HUB = {
    "model_type": "gemma3_text",
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


@pytest.mark.parametrize("name", NESTED)
def test_published_config_is_read_as_by_transformers(name, tmp_path):
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": HUB | NESTED[name],
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours, theirs = load_config(tmp_path), AutoConfig.from_pretrained(tmp_path).text_config
    assert (ours.vocab_size, ours.max_position) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (ours.tied_embeddings, ours.eos_token_ids, ours.dtype) == (True, (1, 106), "bfloat16")
    assert ours.num_layers == len(theirs.layer_types)
    for layer, kind in zip(ours.layers, theirs.layer_types, strict=True):
        mixer = layer.mixer
        assert (mixer.num_heads, mixer.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
        assert (mixer.head_size, mixer.scale) == (theirs.head_dim, theirs.query_pre_attn_scalar**-0.5)
        assert mixer.window == (1024 if kind == "sliding_attention" else 0)
        rope = theirs.rope_parameters[kind]
        assert {key: mixer.rope.parameters.get(key) for key in rope} == rope


def test_older_keys_give_the_same_answers(tmp_path):
    """Rope in three keys, and a number in place of the layers' types."""
    reference = golden("gemma3")
    values = json.loads((reference.directory / "config.json").read_text())
    ropes = values.pop("rope_parameters")
    full = ropes["full_attention"]
    values |= {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}
    values |= {"rope_local_base_freq": ropes["sliding_attention"]["rope_theta"], "sliding_window_pattern": 2}
    del values["layer_types"]
    for path in reference.directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values))
    with recorded(tmp_path) as (llm, rows):
        check_answers(greedy(llm), rows, reference.tokens, reference.logits)


@pytest.mark.parametrize("as_published", [False, True])
def test_text_part(as_published, tmp_path, caplog):
    """With the tensors' names of Transformers 5 or of the hub."""
    directory = make_checkpoint(tmp_path, "gemma3-pictures")
    references = transformers_greedy(directory, SOME, 8, AutoModelForImageTextToText)
    plain = {
        name.removeprefix("model.").replace("language_model.model.", "language_model."): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    assert any(name.startswith("language_model.layers.") for name in plain)
    if as_published:
        tensors = {name.replace("language_model.", "language_model.model."): x for name, x in plain.items()}
    else:
        tensors = {f"model.{name}": x for name, x in plain.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, "labinfer"), recorded(directory) as (llm, rows):
        tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
        check_answers(greedy(llm, SOME, 8), rows, tokens, logits)
    (line,) = [record.message for record in caplog.records if "not loaded" in record.message]
    assert "vision_tower" in line and "multi_modal_projector" in line


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar should be above 0"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping should be above 0"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters should have an entry for"),
    ],
)
def test_what_is_not_computed_is_refused(change, complaint, tmp_path):
    values = json.loads((golden("gemma3").directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=complaint):
        load_config(tmp_path)


def test_bound_of_logits_beside_pictures_is_refused(tmp_path):
    text = HUB | NESTED["4b"] | {"final_logit_softcapping": 30.0}
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="final_logit_softcapping beside pictures"):
        load_config(tmp_path)


@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 5}], ids=["whole", "chunks"])
def test_answers_in_this_process(options):
    """Chunks that are smaller and larger than the window."""
    reference = golden("gemma3")
    with recorded(reference.directory, **options) as (llm, rows):
        check_answers(greedy(llm), rows, reference.tokens, reference.logits)


def test_compiled_step_is_captured(caplog):
    """In bfloat16 nothing between the functions keeps a step from being repeated as one."""
    check_captured(golden("gemma3").directory, caplog)
