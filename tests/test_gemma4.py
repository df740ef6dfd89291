"""Gemma 4's kinds of layers beside Transformers', as published and as Transformers writes them, and its compiled steps."""

from __future__ import annotations

import json

import pytest
from checkpoints import SHARED_CACHES, auto_class, make_checkpoint, transformers_greedy
from golden import PROMPTS, check_answers, check_captured, greedy, recorded
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from labinfer.base.errors import UserError
from labinfer.models.config import ModelConfig
from labinfer.models.layers.attention import AttentionConfig
from labinfer.models.registry import load_config

KINDS = ("gemma4", "gemma4-tied-values", "gemma4-moe", "gemma4-layer-inputs", SHARED_CACHES)
SOME = PROMPTS[2:4]
NUM_TOKENS = 8
PUBLISHED = {
    "E2B": {
        "attention_k_eq_v": False,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "sliding_window": 512,
        "use_double_wide_mlp": True,
    },
    "26B-A4B": {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
        "top_k_experts": 8,
    },
}
"""Shapes like those of the models of these names: ``text_config`` without what its defaults say."""


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """A checkpoint, and Transformers' answers to ``SOME`` of the prompts."""
    directory = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return directory, transformers_greedy(directory, SOME, NUM_TOKENS, auto_class(request.param))


def check(directory, references, **options) -> dict[str, int]:
    """Counts of a run in which the answers came twice, the second time with prompts that were found in the cache."""
    tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
    with recorded(directory, **options) as (llm, rows):
        for _ in range(2):
            check_answers(greedy(llm, SOME, NUM_TOKENS), rows, tokens, logits)
            rows.clear()
        return dict(llm.report.counts)


@pytest.mark.each_value
@pytest.mark.parametrize("chunk", [5, 512])
def test_answers_are_transformers(model, chunk):
    """Chunks that are smaller and larger than the window of 8 tokens; then prompts that are found."""
    assert check(*model, chunked_prefill_size=chunk)["found"] > 0


def test_shared_caches_take_no_room(model):
    config = load_config(model[0])
    with recorded(model[0]) as (llm, _):
        specs = llm._parts.worker.runner.model.cache_specs()
    for layer, spec in zip(config.layers, specs, strict=True):
        assert bool(spec.per_token) == (layer.cache_layer is None)
    sources = [layer.cache_layer for layer in config.layers]
    assert sources == ([None] * 4 + [2, 3] * 2 if config.num_layers == 8 else [None] * 4)


def test_compiled_step_is_captured(model, caplog):
    """In bfloat16 nothing between the functions keeps a step from being repeated as one."""
    check_captured(model[0], caplog)


def test_published_spelling_gives_the_same_answers(model, tmp_path):
    """Heads of layers without a window in keys of their own, nested beside what sees, and tensors that nothing reads."""
    directory, references = model
    config, values = load_config(directory), json.loads((directory / "config.json").read_text())
    full = next(layer.mixer for layer in config.layers if not layer.mixer.window)
    del values["per_layer_config"]
    values |= {"global_head_dim": full.head_size, "num_global_key_value_heads": full.num_kv_heads}
    name = values.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    outer = {"architectures": [name], "tie_word_embeddings": values["tie_word_embeddings"], "text_config": values}
    tensors = load_file(directory / "model.safetensors")
    shared = [number for number, layer in enumerate(config.layers) if layer.cache_layer is not None]
    for number in shared:
        for part in ("k_proj", "v_proj", "k_norm"):
            stored = f"model.layers.{number}.self_attn.{part}.weight"
            tensors[stored] = tensors[f"model.layers.0.self_attn.{part}.weight"].clone()
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    tensors["model.vision_tower.std_bias"] = tensors["model.language_model.norm.weight"].clone()
    for path in directory.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").write_text(json.dumps(outer))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check(tmp_path, references)


def write_config(directory, text: dict) -> ModelConfig:
    values = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (directory / "config.json").write_text(json.dumps(values))
    return load_config(directory)


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_is_read_as_by_transformers(name, tmp_path):
    text = PUBLISHED[name] | {"model_type": "gemma4_text", "final_logit_softcapping": 30.0}
    ours = write_config(tmp_path, text)
    theirs = AutoConfig.from_pretrained(tmp_path).text_config
    assert (ours.vocab_size, ours.max_position) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (ours.tied_embeddings, ours.logits_cap, ours.num_layers) == (True, 30.0, len(theirs.layer_types))
    assert (ours.layer_inputs is None) == (theirs.hidden_size_per_layer_input == 0)
    modes = theirs.kv_sharing_modes
    for number, (layer, kind) in enumerate(zip(ours.layers, theirs.layer_types, strict=True)):
        own, mixer = theirs.per_layer_config[number], layer.mixer
        assert isinstance(mixer, AttentionConfig) and mixer.scale == 1.0
        assert (mixer.num_heads, mixer.num_kv_heads) == (theirs.num_attention_heads, own.num_key_value_heads)
        assert mixer.head_size == own.head_dim == mixer.rope.dim
        assert mixer.window == (theirs.sliding_window if kind == "sliding_attention" else 0)
        assert mixer.tied_values == (theirs.attention_k_eq_v and not mixer.window)
        assert mixer.reads_earlier == (layer.cache_layer is not None) == (modes[number] == "reuse")
        if layer.cache_layer is not None:
            assert modes[layer.cache_layer] == "store" and theirs.layer_types[layer.cache_layer] == kind
        rope = theirs.rope_parameters[kind]
        assert {key: mixer.rope.parameters.get(key) for key in rope} == rope
    columns = [getattr(layer.mlp, "dense", layer.mlp).intermediate_size for layer in ours.layers]
    factors = [2 if theirs.use_double_wide_mlp and mode == "reuse" else 1 for mode in modes]
    assert columns == [theirs.intermediate_size * factor for factor in factors]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping should be above 0"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters should have an entry for"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers 35 of 35 layers leaves no cache"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers 31 of 35 layers leaves no cache"),
        ({"per_layer_config": {"0": {"sliding_window": 3}}}, "per_layer_config of layer 0 should have head_dim"),
        (
            {"per_layer_config": {"20": {"num_key_value_heads": 4}}},
            "layer 20 reads the cache of layer 13, which has 1 heads of 256, not 4",
        ),
        ({"vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input 5 is less than vocab_size"),
        ({"enable_moe_block": True}, "has no 'num_experts'"),
    ],
)
def test_what_is_not_computed_is_refused(change, complaint, tmp_path):
    with pytest.raises(UserError, match=complaint):
        write_config(tmp_path, PUBLISHED["E2B"] | change)
