"""Checkpoints as they are published: the values of an oracle (``published_formats``) on every tensor-parallel degree."""

from __future__ import annotations

import json

import pytest
import torch
from published_formats import PUBLISHED, Published, gptq, packed, write_published
from safetensors.torch import load_file, save_file
from tiny_llama import model_of, prompt_logits, write

from labinfer.comm.local import LocalCommunicator
from labinfer.errors import UserError
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.providers import make_registry
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.functions.reference.quantized import dequantize
from labinfer.layers.matrix import Matrix
from labinfer.models.llama import LlamaForCausalLM
from labinfer.models.registry import load_config
from labinfer.weights.checkpoint import Checkpoint
from labinfer.weights.checkpoint_names import CheckpointNames
from labinfer.weights.formats.registry import METHODS
from labinfer.weights.loader import check_checkpoint, load_weights, weight_slices

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 160,
    "intermediate_size": 11 * 128,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
}
"""11 groups of 128 inputs, which neither 2 nor 3 ranks divide, and inputs that are no multiple of a group."""
RANKS = [(rank, size) for size in (1, 2, 3) for rank in range(size)]
FP8 = [name for name in PUBLISHED if name.startswith("fp8")]
CODES = [name for name, published in PUBLISHED.items() if published.form]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(quantised checkpoint, plain checkpoint of the same values) by name; made when they are asked for."""
    made = {}

    def make(name: str):
        if name not in made:
            directory = tmp_path_factory.mktemp("checkpoints") / name
            directory.mkdir()
            write(directory, **SHAPE)
            write_published(directory, directory.parent / "twin", PUBLISHED[name])
            made[name] = directory, directory.parent / "twin"
        return made[name]

    return make


def check_slices(model, checkpoint: Checkpoint) -> None:
    for part in weight_slices(model):
        checkpoint.check(part)


def load(directory, rank: int = 0, size: int = 1, **options):
    config, checkpoint = load_config(directory), Checkpoint(directory)
    model = model_of(config, tp_rank=rank, tp_size=size, **options)
    check_slices(model, checkpoint)
    load_weights(model, checkpoint, CPU, lambda done, total: None)
    return model


def matrices(model) -> dict[str, Matrix]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Matrix)}


def values(matrix: Matrix) -> torch.Tensor:
    """The weights that a matrix holds, packed by the reference."""
    blocks = [block.packed for block in matrix._blocks]
    return torch.cat([dequantize(packed) if hasattr(packed, "scales") else packed.data for packed in blocks])


def forms(model) -> set[tuple[int, int, bool] | None]:
    """The forms of blocks inside the layers."""
    blocks = (block.packed for name, matrix in matrices(model).items() if "layers" in name for block in matrix._blocks)
    return {(one.bits, one.group, one.zeros is not None) if hasattr(one, "scales") else None for one in blocks}


# Weights.


@pytest.mark.parametrize(("rank", "size"), RANKS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_decoded_weights_are_those_of_the_oracle(checkpoints, name, rank, size):
    directory, twin = checkpoints(name)
    model, plain = load(directory, rank, size, quantization="none"), matrices(load(twin, rank, size))
    assert forms(model) == {None}
    for path, matrix in matrices(model).items():
        assert torch.equal(values(matrix), values(plain[path])), path


@pytest.mark.parametrize(("rank", "size"), RANKS)
@pytest.mark.parametrize("name", CODES)
def test_codes_stand_for_the_weights_of_the_oracle(checkpoints, name, rank, size):
    directory, twin = checkpoints(name)
    published, model, plain = PUBLISHED[name], load(directory, rank, size), matrices(load(twin, rank, size))
    assert published.form in forms(model)
    for path, matrix in matrices(model).items():
        got, wanted = values(matrix), values(plain[path])
        if published.exact:
            assert torch.equal(got, wanted), path
        else:
            assert (got - wanted).norm() < 0.008 * wanted.norm(), path


@pytest.mark.parametrize(("rank", "size"), RANKS)
@pytest.mark.parametrize("name", FP8)
def test_fp8_in_8_bits_is_rounded_by_groups(checkpoints, name, rank, size):
    directory, twin = checkpoints(name)
    model, plain = load(directory, rank, size, quantization="int8"), matrices(load(twin, rank, size))
    assert forms(model) == {(8, 128, False)}
    for path, matrix in matrices(model).items():
        got, wanted = values(matrix), values(plain[path])
        assert (got - wanted).norm() < 0.015 * wanted.norm(), path


def test_rounding_to_groups_of_int8_is_within_half_a_step(checkpoints):
    directory, twin = checkpoints("fp8")
    got = values(matrices(load(directory, quantization="int8"))["model.layers.0.mlp.down_proj"]).view(160, 11, 128)
    wanted = values(matrices(load(twin))["model.layers.0.mlp.down_proj"]).view(160, 11, 128)
    assert ((got - wanted).abs() <= wanted.abs().amax(dim=2, keepdim=True) / 254 * 1.001).all()


def test_merged_projections_may_be_of_different_forms(checkpoints):
    model = load(checkpoints("gptq-mixed")[0])
    layer = model.model.layers["0"]
    blocks = {
        name: [block.rows for block in getattr(layer, part)._modules[name]._blocks]
        for part, name in (("self_attn", "qkv_proj"), ("mlp", "gate_up_proj"))
    }
    assert blocks == {"qkv_proj": [(0, 192), (192, 256), (256, 320)], "gate_up_proj": [(0, 1408), (1408, 2816)]}
    assert forms(model) == {(4, 128, False), None, (8, 128, False), (4, 32, True)}
    quantizations = [call.quantization for call in layer.self_attn.qkv_proj.calls()]
    assert quantizations == ["int4", "none", "int4"]


def test_rank_reads_only_its_ranges(checkpoints):
    directory, _ = checkpoints("w4a16")
    config = load_config(directory)
    num_read = []
    for rank in range(3):
        checkpoint = Checkpoint(directory)
        load_weights(model_of(config, tp_rank=rank, tp_size=3), checkpoint, CPU, lambda done, total: None)
        num_read.append(checkpoint.bytes_read)
    whole = Checkpoint(directory)
    load_weights(model_of(config), whole, CPU, lambda done, total: None)
    assert max(num_read) < 0.45 * whole.bytes_read


# Products.


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_of_decoded_weights_are_those_of_the_oracle(checkpoints, name):
    directory, twin = checkpoints(name)
    wanted = prompt_logits(load(twin))
    for size in (1, 2, 3):
        ranks = LocalCommunicator.run(
            size, lambda comm: prompt_logits(load(directory, comm.rank, comm.size, comm=comm, quantization="none"))
        )
        torch.testing.assert_close(ranks[0], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def rounded_to_8_bits(x_TI: torch.Tensor) -> torch.Tensor:
    peaks = x_TI.abs().amax(dim=1, keepdim=True)
    factors = torch.full_like(peaks, 127) / peaks  # in float32 and divided once, so that ties are the same
    return (x_TI.double() * factors.double()).round() * peaks.double() / 127


@pytest.mark.parametrize(("rank", "size"), RANKS)
@pytest.mark.parametrize("name", [name for name in CODES if PUBLISHED[name].exact] + ["fp8"])
def test_compiled_products_are_those_with_the_oracles_weights(checkpoints, compiled_functions, name, rank, size):
    """Activations are rounded to 8 bits, each row of a rank's inputs by its largest; nothing else is."""
    torch.manual_seed(0)
    directory, twin = checkpoints(name)
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    quantization = "int8" if name == "fp8" else "auto"
    model = load(directory, rank, size, registry=registry, quantization=quantization)
    held, plain = load(directory, rank, size, quantization=quantization), matrices(load(twin, rank, size))
    for path, matrix in matrices(model).items():
        x_TI = torch.randn(14, matrix.num_inputs)
        weights = values(plain[path] if name != "fp8" else matrices(held)[path]).double()
        is_coded = torch.tensor([hasattr(block.packed, "scales") for block in matrix._blocks])
        wanted = (rounded_to_8_bits(x_TI) if is_coded.any() else x_TI.double()) @ weights.T
        exact = x_TI.double() @ weights.T
        for block in matrix._blocks:
            part = wanted if hasattr(block.packed, "scales") else exact
            got = matrix.product(x_TI)[:, block.slice]
            torch.testing.assert_close(
                got, part[:, block.slice].float(), rtol=1e-5, atol=2e-5 * float(part.abs().max())
            )


# What cannot be read.


@pytest.mark.parametrize("name", ["gptq-asym", "awq", "w4a16-asym", "w8a8", "fp8", "gptq-act-order"])
@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_damaged_tensor_is_refused_before_memory_is_taken(checkpoints, tmp_path, name, damage):
    directory, _ = checkpoints(name)
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    prefix = "model.layers.0.mlp.down_proj."
    for suffix in [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]:
        broken = dict(tensors)
        tensor = broken.pop(prefix + suffix)
        if suffix == "weight_shape" or (name in ("gptq-asym", "awq") and suffix == "g_idx"):
            continue
        if damage == "shape":
            broken[prefix + suffix] = tensor.view(torch.uint8).repeat(2, *(1,) * (tensor.ndim - 1)).view(tensor.dtype)
        elif damage == "dtype":
            broken[prefix + suffix] = torch.zeros(tensor.shape, dtype=torch.int16)
        write(tmp_path, broken, **config)
        with torch.device("meta"):
            model = model_of(load_config(tmp_path))
        with pytest.raises(UserError, match=rf"tensor {prefix}{suffix} (of|has|holds) "):
            check_slices(model, Checkpoint(tmp_path))


GPTQ = gptq(4, 128, sym=True)[0]
W4A16 = packed(4, 128, sym=True)[0]


def scheme(**changes) -> dict:
    weights = W4A16["config_groups"]["group_0"]["weights"] | changes
    return W4A16 | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (GPTQ | {"bits": 3}, r"\(gptq\): bits 3 is not supported; supported: 4, 8"),
        (GPTQ | {"bits": None}, "bits None is not supported; supported: 4, 8"),
        (GPTQ | {"group_size": 24}, "group_size 24 is not supported; supported: multiples of 16"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2",
        ),
        (GPTQ | {"sym": "yes"}, "sym should be bool, not 'yes'"),
        (GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 2}}}, r"dynamic\.\+:\.\*up_proj\.bits 2 is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported; supported: 4"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point False is not supported; supported: True"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size should be .*not \[128\]"),
        (
            W4A16 | {"format": "nvfp4-pack-quantized"},
            "format 'nvfp4-pack-quantized' is not supported; supported: pack-",
        ),
        (W4A16 | {"config_groups": []}, r"config_groups should be an object, not \[\]"),
        (scheme(num_bits=2), r"config_groups\.group_0\.weights\.num_bits 2 is not supported; supported: 4, 8"),
        (
            scheme(strategy="tensor_group"),
            "weights.strategy 'tensor_group' is not supported; supported: channel, group",
        ),
        (scheme(actorder="dynamic"), "actorder 'dynamic' is not supported; supported: none, weight, static, group"),
        (W4A16 | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format 'sparse-24' is not supported"),
        ({"quant_method": "bitsandbytes"}, r"quant_method 'bitsandbytes', which is not supported \(fp8, compressed-"),
    ],
)
def test_scheme_that_is_not_supported_is_refused_with_its_value(tmp_path, config, complaint):
    directory, tensors = write(tmp_path)
    write(tmp_path, tensors, quantization_config=config)
    for read in (load_config, Checkpoint):
        with pytest.raises(UserError, match=f"config.json: quantization_config .*{complaint}") as error:
            read(directory)
        assert "\n" not in str(error.value)


def test_truncated_file_is_refused(checkpoints, tmp_path):
    directory, _ = checkpoints("w4a16")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match="model.safetensors is not a valid safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "complaint"), [("sym", True, "says sym true"), ("desc_act", False, "desc_act false")]
)
def test_tensors_that_contradict_the_config_are_refused(checkpoints, tmp_path, key, value, complaint):
    directory, _ = checkpoints("gptq-asym" if key == "sym" else "gptq-act-order")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=complaint):
        load(tmp_path)


# Which matrices.


def chosen(config: dict, *names: str) -> list[str]:
    choose = METHODS[config["quant_method"]]
    from labinfer.weights.formats.settings import Settings

    formats = choose(Settings(config))
    return [type(formats(name)).__name__.removesuffix("Format") for name in names]


NAMES = (
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.11.mlp.up_proj",
    "lm_head",
    "model.embed_tokens",
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            awq_config := {"quant_method": "awq", "modules_to_not_convert": ["gate"]},
            ["Plain", "Awq", "Awq", "Plain", "Plain"],
        ),
        (awq_config | {"modules_to_not_convert": ["model.layers.1"]}, ["Plain", "Plain", "Awq", "Plain", "Plain"]),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"]},
            ["Plain", "Fp8", "Fp8", "Plain", "Plain"],
        ),
        (GPTQ | {"lm_head": True, "dynamic": {r"-:.*\.1\.mlp\.gate$": {}}}, ["Plain", "Gptq", "Gptq", "Gptq", "Plain"]),
        (W4A16 | {"ignore": ["re:.*mlp.gate$", "lm_head"]}, ["Plain", "Packed", "Packed", "Plain", "Plain"]),
        (W4A16 | {"ignore": []}, ["Packed", "Packed", "Packed", "Packed", "Plain"]),
    ],
)
def test_excluded_modules_stay_plain(config, expected):
    assert chosen(config, *NAMES) == expected


def test_scheme_of_a_named_module_comes_before_that_of_its_class():
    eight = {
        "targets": ["re:.*gate_proj"],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "format": "int-quantized",
    }
    config = W4A16 | {"config_groups": W4A16["config_groups"] | {"group_1": eight}}
    assert chosen(config, *NAMES[:3]) == ["Packed", "Int", "Packed"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_has_a_place(checkpoints, name):
    directory, _ = checkpoints(name)
    check_checkpoint(model_of(load_config(directory)), Checkpoint(directory), tied_head=False)


def test_modules_may_be_excluded_under_any_root_of_a_family(checkpoints, tmp_path, monkeypatch):
    """Which root a checkpoint has is known when it is opened, and forms are chosen before."""
    directory, twin = checkpoints("gptq-mixed")
    names = CheckpointNames(roots=("model.language_model",))
    monkeypatch.setattr(LlamaForCausalLM, "names", names)
    config = json.loads((directory / "config.json").read_text())
    rules = config["quantization_config"]["dynamic"]
    config["quantization_config"]["dynamic"] = {r"-:model\.language_model\.layers\.0\.self_attn\.k_proj": {}} | {
        rule: changes for rule, changes in rules.items() if not rule.startswith("-:")
    }
    tensors = load_file(directory / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    write(tmp_path, tensors, **config)
    model, plain = load_config(tmp_path), matrices(load(twin))
    model = model_of(model, names=names)
    load_weights(model, Checkpoint(tmp_path), CPU, lambda done, total: None)
    assert forms(model) == {(4, 128, False), None, (8, 128, False), (4, 32, True)}
    for path, matrix in matrices(model).items():
        assert torch.equal(values(matrix), values(plain[path])), path


def test_act_order_is_told_once():
    from labinfer.weights.formats.registry import read_formats

    for name in ("gptq-act-order", "w4a16-act-order"):
        formats = read_formats({"quantization_config": PUBLISHED[name].quantization_config}, "config.json")
        assert len(formats.warnings) == 1 and "act-order" in formats.warnings[0]
    assert not read_formats({"quantization_config": PUBLISHED["awq"].quantization_config}, "config.json").warnings


def test_head_may_be_held_in_codes(tmp_path):
    config, store = gptq(4, 32, sym=True)
    published = Published(config | {"lm_head": True}, store, (4, 32, False), linears=("lm_head", "down_proj"))
    rules = {r"-:.*self_attn.*": {}, r"-:.*(gate|up)_proj": {}}
    published.quantization_config["dynamic"] = rules
    directory = tmp_path / "model"
    directory.mkdir()
    write(directory, **SHAPE, vocab_size=56)
    write_published(directory, tmp_path / "twin", published)
    for rank in range(3):
        head, plain = (matrices(load(path, rank, 3))["lm_head"] for path in (directory, tmp_path / "twin"))
        assert head.packed.bits == 4
        assert torch.equal(values(head), values(plain))


def test_plain_file_in_a_quantised_checkpoint_is_named(checkpoints, tmp_path):
    directory, twin = checkpoints("gptq-sym")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file(load_file(twin / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"model.layers.0.self_attn.q_proj.weight is not quantised, but quantization_config"
    ):
        load(tmp_path)
