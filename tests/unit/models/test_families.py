"""Every family's ``config.json``: read as Transformers writes it, in the older spelling of rope, and refused by key."""

from __future__ import annotations

import json

import pytest
from checkpoints import CONFIGS, FAMILIES, architecture
from transformers import DeepseekV3Config

from labinfer.base.errors import UserError
from labinfer.base.kinds import MODEL_FAMILIES
from labinfer.base.registry import REGISTRY
from labinfer.models.architectures import check_architecture
from labinfer.models.registry import load_config

EVERY_KIND = ("qwen2-windows", "llama-untied", *FAMILIES)


def write(directory, kind, change=lambda values: values):
    CONFIGS[kind]().save_pretrained(directory)
    path = directory / "config.json"
    values = json.loads(path.read_text())
    values.setdefault("architectures", [architecture(kind)])
    path.write_text(json.dumps(change(values)))
    return directory


def older_spelling(values: dict) -> dict:
    """As before Transformers 5: ``rope_theta`` beside ``rope_scaling``, which is missing where nothing is scaled."""
    values = dict(values)
    rope = values.pop("rope_parameters")
    is_by_type = "full_attention" in rope
    if is_by_type:  # one theta for all but Gemma; the scaling is that of the full layers
        values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    values["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    if kind != "default":
        values["rope_scaling"] = {"rope_type" if is_by_type else "type": kind} | rope
    return values


@pytest.mark.parametrize(
    "kind", [kind for kind in EVERY_KIND if not kind.startswith(("gemma4", "mimo", "nemotron"))]
)  # the older one has no rope of theirs
def test_both_spellings_of_rope_give_the_same_tables(tmp_path, kind):
    def same_theta(values: dict) -> dict:
        """The older spelling has one theta, which in OLMo 3 is that of full attention alone."""
        rope = values["rope_parameters"]
        if "full_attention" in rope:
            theta = 5e5 if kind == "olmo3" else rope["full_attention"]["rope_theta"]
            rope["sliding_attention"]["rope_theta"] = theta
        return values

    newer = load_config(write(tmp_path / "newer", kind, same_theta))
    older = load_config(write(tmp_path / "older", kind, lambda values: older_spelling(same_theta(values))))
    assert len(newer.layers) == len(older.layers) == 4
    for layer, same in zip(newer.layers, older.layers, strict=True):
        assert tables(layer) == tables(same)


def tables(layer) -> tuple | None:
    rope = getattr(layer.mixer, "rope", None)
    if rope is None:
        return None
    scaling = {key: value for key, value in rope.parameters.items() if key not in ("type", "partial_rotary_factor")}
    return rope.dim, rope.interleaved, rope.max_position, scaling


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_required_keys_are_named_with_their_file(tmp_path, kind):
    columns = "moe_intermediate_size" if kind == "qwen3.5-moe" else "intermediate_size"
    # Not needed: Nemotron-H's pattern has a letter for each layer, and a dense Granite has no experts.
    others = {"nemotron-h": ("num_hidden_layers",), "granite-hybrid": (columns,)}.get(kind, ())
    for key in {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", columns}.difference(others):
        directory = write(tmp_path / key, kind, lambda values, key=key: {k: v for k, v in values.items() if k != key})
        with pytest.raises(UserError, match=f"config.json has no '{key}'"):
            load_config(directory)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_other_activations_are_refused(tmp_path, kind):
    key = "hidden_activation" if kind.startswith("gemma") else "hidden_act"
    key = "mlp_hidden_act" if kind == "nemotron-h" else key
    with pytest.raises(UserError, match=f"{key} 'gelu' is not supported"):
        load_config(write(tmp_path, kind, lambda values: values | {key: "gelu"}))


UNKNOWN = {
    "DeepSeek-V4": "DeepseekV4ForCausalLM",
    "Kimi Linear": "KimiLinearForCausalLM",
    "Jamba": "JambaForCausalLM",
    "Llama 4": "Llama4ForConditionalGeneration",
}


@pytest.mark.parametrize("name", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("check", [check_architecture, load_config])
def test_unknown_architecture_is_refused_by_name_with_those_that_are_known(tmp_path, name, check):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "quantization_config": {"bits": 3}}))
    with pytest.raises(UserError) as caught:
        check(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: architecture {name!r} is not supported; ")
    assert message.endswith(f"; supported are {', '.join(REGISTRY.names('model_family'))}")


def test_unknown_architecture_is_refused_with_the_most_similar_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLLM"]}))
    with pytest.raises(UserError) as caught:
        check_architecture(tmp_path)
    assert (
        "; if its layers are those of Qwen3ForCausalLM, set architectures to "
        '["Qwen3ForCausalLM"] in config.json of a copy of the directory; supported are'
    ) in str(caught.value)


@pytest.mark.parametrize("check", [check_architecture, load_config])
@pytest.mark.parametrize("names", [None, [], ["OwnModel"]])
def test_code_of_a_checkpoint_is_named_and_never_run(tmp_path, names, check):
    values = {
        "architectures": names,
        "model_type": "own",
        "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnModel"},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('run')")
    what = "architecture 'OwnModel'" if names else "model_type 'own' without 'architectures'"
    with pytest.raises(UserError, match=f"{what} is not supported .remote code of 'auto_map' is never run.; supp"):
        check(tmp_path)


def test_known_architecture_with_code_of_its_own_is_read(tmp_path):
    config = load_config(
        write(tmp_path, "minicpm3", lambda values: values | {"auto_map": {"AutoConfig": "own.Config"}})
    )
    assert config.architecture == "MiniCPM3ForCausalLM"


def test_every_shipped_family_has_a_golden_checkpoint():
    elsewhere = {"KimiK25ForConditionalGeneration", "Step3p5ForCausalLM"}  # Transformers' classes have other names
    assert {architecture(kind) for kind in CONFIGS} == set(MODEL_FAMILIES) - elsewhere


@pytest.mark.parametrize(("fraction", "complaint"), [(0.0, "above 0"), (1.5, "at most 1"), ("half", "should be float")])
def test_partial_rotary_factor_out_of_range_is_refused(tmp_path, fraction, complaint):
    def change(values: dict) -> dict:
        values["rope_parameters"].pop("partial_rotary_factor")
        return values | {"partial_rotary_factor": fraction}

    with pytest.raises(UserError, match=f"partial_rotary_factor should be .*{complaint}|{complaint}"):
        load_config(write(tmp_path, "glm4", change))


def test_longrope_takes_its_factors_by_the_context_limit():
    from labinfer.models.layers.rope import inverse_frequencies

    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 2.0],
        "long_factor": [3.0, 4.0],
        "original_max_position_embeddings": 8,
    }
    plain, _ = inverse_frequencies(4, {"rope_theta": 1e4}, 32)
    for length, factors in ((8, [1.0, 2.0]), (9, [3.0, 4.0])):
        frequencies, sharpening = inverse_frequencies(4, parameters, 32, length)
        assert (plain / frequencies).tolist() == pytest.approx(factors)
        assert sharpening == pytest.approx((1 + 2 / 3) ** 0.5)  # sqrt(1 + ln(32/8) / ln(8))


def test_null_in_a_text_config_leaves_what_is_around_it(tmp_path):
    def change(values: dict) -> dict:
        text = values["text_config"] | {"dtype": None, "architectures": None, "tie_word_embeddings": None}
        return values | {"dtype": "bfloat16", "text_config": text}

    config = load_config(write(tmp_path, "qwen3.5-moe-pictures", change))
    assert (config.dtype, config.tied_embeddings) == ("bfloat16", True)
    assert config.architecture == "Qwen3_5MoeForConditionalGeneration"


def test_groups_that_a_config_leaves_out_are_those_of_its_family(tmp_path):
    def change(values: dict) -> dict:
        kept = {name: value for name, value in values.items() if name not in ("n_group", "topk_group")}
        return kept | {"n_routed_experts": 16}

    assert DeepseekV3Config().n_group == 8 and DeepseekV3Config().topk_group == 4
    router = load_config(write(tmp_path, "deepseek-v3", change)).layers[-1].mlp.router
    assert (router.num_groups, router.num_chosen_groups) == (8, 4)


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        (
            "qwen3.5",
            {"layer_types": ["linear_attention"] * 3},
            "layer_types should be a list of 4 times linear_attention",
        ),
        ("qwen3.5", {"layer_types": ["sliding_attention"] * 4}, "layer_types should be a list of 4 times"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ("qwen3.5-moe", {"linear_num_value_heads": 7}, "linear_num_value_heads 7 is not a multiple of .* 5"),
        ("qwen3-next-moe", {"num_experts_per_tok": 8}, "8 experts are to be chosen for each token, of 7"),
        ("hunyuan-moe", {"moe_topk": [3, 1]}, "moe_topk has 2 entries, but there are more layers"),
        ("glm4-moe-groups", {"n_group": 5}, "12 experts cannot be chosen from 2 of 5 equal groups"),
        ("glm4-moe-groups", {"num_experts_per_tok": 7}, "7 experts are to be chosen for each token, of 6"),
        ("ernie4.5-moe", {"use_bias": True}, "use_bias is not supported"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob true is not supported for DeepSeek-V2"),
        (
            "deepseek-v2",
            {"topk_method": "noaux_tc"},
            "topk_method 'noaux_tc' is not supported; supported are greedy and",
        ),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for this architecture"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; only 1 is"),
        ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank must be from 1 to"),
        ("deepseek-v3", {"n_group": 5}, "12 experts cannot be chosen from 2 of 5 equal groups"),
        (
            "deepseek-v3-plain",
            {"qk_rope_head_dim": 7},
            "7 dimensions of a head are to be rotated, which is not an even",
        ),
        (
            "kimi-k2.5-pictures",
            {"text_config": {"model_type": "llama"}},
            "model_type 'llama' of text_config is not supported",
        ),
        (
            "glm-4.7-flash",
            {"mlp_layer_types": ["dense"] * 3},
            "mlp_layer_types should be a list of 4 times dense or sparse",
        ),
        ("minicpm3", {"scale_emb": 0}, "scale_emb should be a number above 0, not 0"),
        ("minimax-m2", {"num_local_experts": "many"}, "num_local_experts should be int, not 'many'"),
    ],
)
def test_mixture_or_hybrid_that_makes_no_sense_is_refused_in_one_line(tmp_path, kind, changes, complaint):
    with pytest.raises(UserError, match=f"config.json: .*{complaint}") as caught:
        load_config(write(tmp_path, kind, lambda values: values | changes))
    assert "\n" not in str(caught.value)
