"""Keys of ``config.json`` that change the computation, through ``LLM`` against Transformers, or refused in one line."""

from __future__ import annotations

import json
import logging
import re

import pytest
from checkpoints import CONFIGS, FAMILIES, YARN, architecture, make_checkpoint, transformers_greedy
from golden import PROMPTS, check_answers, greedy, recorded
from safetensors.torch import load_file, save_file

from labinfer.base.errors import UserError
from labinfer.models.config_file import FULL, SLIDING
from labinfer.models.registry import load_config

SOME = PROMPTS[2:4]
NUM_TOKENS = 6
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def change_config(directory, drop=(), **changes):
    path = directory / "config.json"
    values = {key: value for key, value in (json.loads(path.read_text()) | changes).items() if key not in drop}
    path.write_text(json.dumps(values))
    return directory


def assert_transformers_answers(directory, **options):
    """Greedy tokens are Transformers', and logits within the tolerance of all golden tests (1e-4 relative)."""
    reference = transformers_greedy(directory, SOME, NUM_TOKENS)
    with recorded(directory, **options) as (llm, rows):
        outputs = greedy(llm, SOME, NUM_TOKENS)
    check_answers(
        outputs, rows, [answer["token_ids"] for answer in reference], [answer["logits"] for answer in reference]
    )


@pytest.mark.parametrize("kind", ["qwen2-tied", "llama-untied", *FAMILIES])
@pytest.mark.parametrize("value", [False, None, 0, "no"])
def test_models_that_are_not_causal_generate_nothing_in_every_family(tmp_path, kind, value):
    values = json.loads(CONFIGS[kind]().to_json_string()) | {"architectures": [architecture(kind)]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | {"is_causal": True}))
    assert load_config(tmp_path).is_causal
    path.write_text(json.dumps(values | {"is_causal": value}))
    try:
        config = load_config(tmp_path)
    except UserError as error:
        assert re.search("config.json: is_causal (false needs full attention|should be true or false)", str(error))
    else:
        assert value is False and not config.is_causal and config.no_generation


def test_mistral_with_layer_types_has_a_window_in_those_that_it_names(tmp_path):
    """As Ministral 8B is published: a ``MistralForCausalLM``, which Transformers takes for one of its Ministral."""
    directory = make_checkpoint(tmp_path, "mistral")
    types = [FULL, SLIDING, SLIDING, SLIDING]
    change_config(directory, layer_types=types)
    assert [layer.mixer.window for layer in load_config(directory).layers] == [0, 8, 8, 8]
    assert_transformers_answers(directory)


@pytest.mark.parametrize("types", [[FULL] * 3, [FULL] * 3 + ["chunked_attention"], "full"])
def test_mistral_with_other_layer_types_is_refused(tmp_path, types):
    directory = make_checkpoint(tmp_path, "mistral")
    with pytest.raises(UserError, match="layer_types should be a list of 4"):
        load_config(change_config(directory, layer_types=types))


@pytest.mark.parametrize("changes", [{"swiglu_alpha": 1.1}, {"swiglu_limit": 0.5, "swiglu_alpha": 2.5}])
def test_activation_of_gpt_oss_is_that_of_the_config(tmp_path, changes):
    directory = make_checkpoint(tmp_path, "gpt-oss")
    assert_transformers_answers(change_config(directory, **changes))


def test_gpt_oss_without_rope_parameters_has_transformers_yarn(tmp_path):
    directory = make_checkpoint(tmp_path, "gpt-oss", max_position_embeddings=131072)
    assert_transformers_answers(change_config(directory, drop=("rope_parameters",)))


@pytest.mark.parametrize("same", [False, True])
def test_tied_config_beside_a_different_head_is_not_tied(tmp_path, same, caplog):
    directory = make_checkpoint(tmp_path, "qwen2-tied")
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding.clone()
    if not same:
        head[-1, -1] += 1.0
        head[7] = -head[7]
    save_file(tensors | {"lm_head.weight": head}, directory / "model.safetensors", metadata={"format": "pt"})
    assert load_config(directory).tied_embeddings == same
    with caplog.at_level(logging.WARNING, logger="labinfer"):
        assert_transformers_answers(directory)
    ours = (record.message for record in caplog.records if record.name.startswith("labinfer."))
    warnings = [message for message in ours if "tie_word_embeddings" in message]
    assert len(warnings) == (0 if same else 1)


def test_head_in_another_dtype_is_compared_by_value(tmp_path):
    directory = make_checkpoint(tmp_path, "qwen2-tied")
    tensors = load_file(directory / "model.safetensors")
    half = tensors["model.embed_tokens.weight"].bfloat16()
    for embedding, is_tied in ((half.float(), True), (tensors["model.embed_tokens.weight"], False)):
        changed = tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": half}
        save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
        assert load_config(directory).tied_embeddings == is_tied


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("llama-untied", {"sliding_window": 8}, "sliding_window 8 is not supported"),
        ("glm4", {"layer_types": [FULL, SLIDING] * 2}, "layer_types .* is not supported"),
        ("qwen3", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config is not supported"),
        ("llama-untied", {"attention_chunk_size": 8}, "attention_chunk_size 8 is not supported"),
        ("ministral3", {"layer_types": [FULL, SLIDING] * 2}, "layer_types .* is not supported"),
        ("gpt-oss", {"swiglu_alpha": 0}, "swiglu_alpha should be above 0"),
        ("olmo3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "both rope_parameters and rope_scaling"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("deepseek-v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            "olmo3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
            "should have an entry for full_attention",
        ),
        (
            "olmo3",
            {"rope_parameters": {FULL: YARN | {"truncate": False}, SLIDING: PLAIN}},
            "truncate False .* is not supported",
        ),
        (
            "gemma3",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "a type but no rope_type",
        ),
        (
            "qwen3",
            {"max_position_embeddings": None, "rope_parameters": DYNAMIC},
            "rope of type dynamic needs max_position_embeddings",
        ),
        ("gemma4", {"layer_types": [FULL, SLIDING] * 2}, "layer_types ends in sliding_attention"),
        ("gemma4", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is not supported in Gemma 4"),
    ],
)
def test_key_that_a_family_does_not_obey_is_refused(tmp_path, kind, changes, complaint):
    values = json.loads(CONFIGS[kind]().to_json_string()) | {"architectures": [architecture(kind)]}
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(UserError, match=f"config.json: [^\n]*{complaint}[^\n]*$"):
        load_config(tmp_path)


@pytest.mark.parametrize("off", [{"sliding_window": None}, {"sliding_window": 8, "use_sliding_window": False}])
def test_window_that_is_switched_off_is_none(tmp_path, off):
    values = json.loads(CONFIGS["llama-untied"]().to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values | off))
    assert {layer.mixer.window for layer in load_config(tmp_path).layers} == {0}


def test_rope_scaling_goes_before_rope_parameters(tmp_path):
    directory = make_checkpoint(tmp_path, "llama-untied")
    assert_transformers_answers(change_config(directory, rope_scaling={"rope_type": "linear", "factor": 2.0}))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        # Only HunYuan's dynamic rope has an alpha.
        ("qwen3", {"rope_parameters": DYNAMIC | {"alpha": 5.0}}),
        # YaRN's ramp is reversed if it ends before it begins.
        ("gpt-oss", {"original_max_position_embeddings": 3}),
        # Beside rope parameters by type of layers, of which each has its own.
        ("olmo3", {"original_max_position_embeddings": 3}),
        # ``rope_theta`` applies to layers with full attention only.
        ("olmo3", {"rope_parameters": None, "rope_theta": 500.0}),
    ],
)
def test_rope_parameter_is_read_as_by_transformers(tmp_path, kind, changes):
    assert_transformers_answers(change_config(make_checkpoint(tmp_path, kind), **changes))


@pytest.mark.parametrize("own", [{}, {"original_max_position_embeddings": 3}])
def test_phi3_without_an_original_context_has_the_default_of_transformers(tmp_path, own):
    """That is 4096, which goes before the original context among the rope parameters."""
    directory = make_checkpoint(tmp_path, "phi4-mini-long")
    rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
    rope = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"} | own
    assert_transformers_answers(
        change_config(directory, drop=["original_max_position_embeddings"], rope_parameters=rope)
    )


def test_ministral3_with_two_original_contexts_is_refused(tmp_path):
    values = json.loads(CONFIGS["ministral3"]().to_json_string()) | {"architectures": [architecture("ministral3")]}
    (tmp_path / "config.json").write_text(json.dumps(values | {"original_max_position_embeddings": 3}))
    with pytest.raises(UserError, match="original_max_position_embeddings 3 differs from that of the rope parameters"):
        load_config(tmp_path)


def test_minicpm3_without_max_position_embeddings_has_the_default_of_transformers(tmp_path):
    directory = make_checkpoint(tmp_path, "minicpm3")
    assert_transformers_answers(change_config(directory, drop=("max_position_embeddings",)), max_model_len=256)


@pytest.mark.parametrize("key", ["norm_topk_prob", "rope_interleave"])
def test_null_for_a_boolean_is_false(tmp_path, key):
    assert_transformers_answers(
        change_config(make_checkpoint(tmp_path, "deepseek-v3-plain"), **{"norm_topk_prob": True, key: None})
    )
