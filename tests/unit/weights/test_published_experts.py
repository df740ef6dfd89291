"""Experts of checkpoints as they are published: the values of an oracle (``published_formats``) on every tensor-parallel degree."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from published_formats import PUBLISHED, Published, fp8, write_published
from published_models import published_pairs
from safetensors.torch import load_file, save_file
from tiny_llama import model_of, prompt_logits, write

from labinfer.base.errors import UserError
from labinfer.comm.local import LocalCommunicator
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.functions.reference.quantized import dequantize
from labinfer.launch.providers import make_registry
from labinfer.models.families.layers.experts import RoutedExperts
from labinfer.models.registry import load_config
from labinfer.weights import tensor_files
from labinfer.weights.loader import check_checkpoint, load_weights
from labinfer.weights.model_files import open_model

CPU = torch.device("cpu")
NUM_EXPERTS, HIDDEN, COLUMNS = 3, 64, 11 * 128
SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "moe_intermediate_size": COLUMNS,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
}
"""11 groups of 128 inputs of down, which neither 2 nor 3 ranks divide, and fewer inputs of gate and up than a group."""
NAMES = ["gptq-sym", "gptq-asym", "gptq-8-channel", "gptq-act-order", "awq", "w4a16-32-half"]
MORE_NAMES = ["gptq-channel", "gptq-8-asym", "w4a16-asym", "w8a8", "w8a8-group"]
LAYOUTS = [(rank, size, cut) for size in (1, 2, 3) for rank in range(size) for cut in ("columns", "whole")]
PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(quantised checkpoint, plain checkpoint of the same values) by name; made when they are asked for."""
    return published_pairs(tmp_path_factory, SHAPE)


def load(directory, rank: int = 0, size: int = 1, **options) -> RoutedExperts:
    return load_model(directory, rank, size, **options).model.layers["0"].mlp.experts


def load_model(directory, rank: int = 0, size: int = 1, **options):
    config, checkpoint = load_config(directory), open_model(directory).open_weights()
    with torch.device("meta"):
        whole, model = (
            model_of(config, **options | {"comm": None}),
            model_of(config, tp_rank=rank, tp_size=size, **options),
        )
    check_checkpoint(whole, checkpoint, tied_head=False)
    load_weights(model, checkpoint, CPU, lambda done, total: None)
    return model


def pairs(experts: RoutedExperts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Values of gate with up, and down, of each expert that a rank holds, packed by the reference."""

    def values(weight) -> torch.Tensor:
        return dequantize(weight) if hasattr(weight, "scales") else weight.data

    return [(values(gate_up), values(down)) for gate_up, down in experts.packed.pairs]


def forms(experts: RoutedExperts) -> set[tuple[int, int, bool] | None]:
    weights = (weight for pair in experts.packed.pairs for weight in pair)
    return {(one.bits, one.group, one.zeros is not None) if hasattr(one, "scales") else None for one in weights}


@pytest.mark.pairwise
@pytest.mark.parametrize(("rank", "size", "cut"), LAYOUTS)
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_NAMES)])
def test_codes_of_experts_stand_for_the_weights_of_the_oracle(checkpoints, name, rank, size, cut):
    directory, twin = checkpoints(name)
    experts, plain = load(directory, rank, size, experts=cut), load(twin, rank, size, experts=cut)
    assert forms(experts) == {PUBLISHED[name].form} and forms(plain) == {None}
    for own, wanted in zip(pairs(experts), pairs(plain), strict=True):
        for matrix, exact in zip(own, wanted, strict=True):
            if PUBLISHED[name].exact:
                assert torch.equal(matrix, exact)
            else:
                assert (matrix - exact).norm() < 0.008 * exact.norm()


@pytest.mark.parametrize("name", ["gptq-asym", "awq", "w4a16", "fp8", "fp8-compressed-channel"])
def test_experts_are_decoded_without_quantization(checkpoints, name):
    directory, twin = checkpoints(name)
    for rank in range(3):
        experts, plain = (load(path, rank, 3, quantization="none") for path in (directory, twin))
        assert forms(experts) == {None}
        for own, wanted in zip(pairs(experts), pairs(plain), strict=True):
            assert all(map(torch.equal, own, wanted))


@pytest.mark.parametrize(
    ("quantization", "form", "error"),
    [("auto", None, 0.0), ("int8", (8, 128, False), 0.015), ("int4", (4, 64, False), 0.2)],
)
def test_fp8_experts_become_what_the_flag_says(checkpoints, quantization, form, error):
    directory, twin = checkpoints("fp8")
    for rank in range(3):
        experts, plain = load(directory, rank, 3, quantization=quantization), load(twin, rank, 3)
        assert forms(experts) == {form}
        for own, wanted in zip(pairs(experts), pairs(plain), strict=True):
            assert all((a - b).norm() <= error * b.norm() for a, b in zip(own, wanted, strict=True))


def test_experts_of_several_forms_are_decoded(checkpoints):
    """Gate is in 8 bits and up has other groups."""
    directory, twin = checkpoints("gptq-mixed")
    experts, plain = load(directory), load(twin)
    assert forms(experts) == {None}
    for own, exact in zip(pairs(experts), pairs(plain), strict=True):
        assert all(map(torch.equal, own, exact))


def test_rank_reads_only_its_ranges_of_experts(checkpoints, monkeypatch):
    monkeypatch.setattr(tensor_files, "SHORTEST_GAP", 1)  # rows of so small experts would be read as a whole
    config, num_read = load_config(checkpoints("w4a16")[0]), {}
    for cut in ("columns", "whole"):
        for size in (1, 3):
            for rank in range(size):
                checkpoint = open_model(checkpoints("w4a16")[0]).open_weights()
                model = model_of(config, tp_rank=rank, tp_size=size, experts=cut)
                load_weights(model, checkpoint, CPU, lambda done, total: None)
                num_read[cut, size, rank] = checkpoint.bytes_read
        assert max(num_read[cut, 3, rank] for rank in range(3)) < 0.45 * num_read[cut, 1, 0]


def test_experts_take_as_much_memory_as_is_planned(checkpoints):
    directory, _ = checkpoints("gptq-asym")
    for rank in range(3):
        with torch.device("meta"):
            planned = model_of(load_config(directory), tp_rank=rank, tp_size=3).model.layers["0"].mlp.experts
        planned.pack()
        assert planned.num_bytes == load(directory, rank, 3).num_bytes


def test_experts_in_codes_are_calls_of_a_target_of_their_own(checkpoints):
    mixture = load_model(checkpoints("gptq-asym")[0]).model.layers["0"].mlp
    (call,) = mixture.calls()
    assert (call.target, call.quantization, call.columns) == ("int4.experts", "int4", COLUMNS)


# Products.


def rounded(rows: torch.Tensor) -> torch.Tensor:
    peaks = rows.abs().amax(dim=1, keepdim=True)
    factors = torch.full_like(peaks, 127) / peaks  # in float32 and divided once, so that ties are the same
    return (rows.double() * factors.double()).round() * peaks.double() / 127


@pytest.mark.pairwise
@pytest.mark.parametrize(("rank", "size", "cut"), LAYOUTS)
@pytest.mark.parametrize("name", ["gptq-sym", "gptq-asym", "gptq-8-asym", "w8a8", "fp8"])
def test_compiled_experts_are_those_with_the_oracles_weights(checkpoints, compiled_functions, name, rank, size, cut):
    """Inputs of both products are rounded to 8 bits, each row by the largest that the rank has of it; nothing else is."""
    torch.manual_seed(0)
    directory, twin = checkpoints(name)
    options = {"experts": cut, "quantization": "int8" if name == "fp8" else "auto"}
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    experts = load(directory, rank, size, registry=registry, **options)
    weights = pairs(load(directory, rank, size, **options) if name == "fp8" else load(twin, rank, size, experts=cut))
    x, first = 0.1 * torch.randn(14, HIDDEN), experts._range[0]
    ids, scores = torch.rand(14, NUM_EXPERTS).argsort(1)[:, :2], torch.rand(14, 2)
    wanted = torch.zeros(14, HIDDEN, dtype=torch.float64)
    for number, (gate_up, down) in enumerate(weights):
        token, slot = torch.where(ids == first + number)
        gate, up = (rounded(x[token]) @ gate_up.double().T).chunk(2, dim=1)
        part = rounded((F.silu(gate) * up).float()) @ down.double().T
        wanted[token] += scores[token, slot].unsqueeze(1) * part
    got = experts(x, ids, scores)
    torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=2e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("cut", ["columns", "whole"])
def test_sum_of_ranks_is_that_of_one(checkpoints, compiled_functions, cut):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    directory, _ = checkpoints("gptq-asym")
    torch.manual_seed(0)
    x, ids, scores = 0.1 * torch.randn(9, HIDDEN), torch.rand(9, NUM_EXPERTS).argsort(1)[:, :2], torch.rand(9, 2)
    alone = load(directory, registry=registry)(x, ids, scores)
    for size in (2, 3, 5):
        ranks = (load(directory, rank, size, registry=registry, experts=cut) for rank in range(size))
        assert (sum(experts(x, ids, scores) for experts in ranks) - alone).norm() < 0.03 * alone.norm()


@pytest.mark.parametrize("cut", ["columns", "whole"])
@pytest.mark.parametrize("name", ["gptq-asym", "w4a16", "fp8"])
def test_logits_of_ranks_are_those_of_the_oracle(checkpoints, compiled_functions, name, cut):
    """Within what the rounding of activations allows; decoded, within float32."""
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    directory, twin = checkpoints(name)
    wanted = prompt_logits(load_model(twin))

    def run(comm: LocalCommunicator, quantization: str) -> torch.Tensor:
        options = {"quantization": quantization, "experts": cut, "registry": registry, "comm": comm}
        return prompt_logits(load_model(directory, comm.rank, comm.size, **options))

    for quantization, error in (("none", 1e-4), ("int8" if name == "fp8" else "auto", 0.05)):
        for size in (1, 2, 3):
            ranks = LocalCommunicator.run(size, partial(run, quantization=quantization))
            assert (ranks[0] - wanted).norm() <= error * wanted.norm()


# Stacks.


def stack(directory, target, dotted: bool, dim: int = 0) -> None:
    """The same checkpoint with the experts of a layer in tensors of all of them.

    Args:
        dotted: tensors are named as those of a module ``gate_up_proj``, not as parameters of ``experts``.
        dim: of outputs in the tensors of one matrix.
    """
    tensors = load_file(directory / "model.safetensors")
    parts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in [name for name in tensors if name.startswith(PREFIX)]:
        expert, matrix, suffix = name.removeprefix(f"{PREFIX}.").split(".")
        parts.setdefault(suffix, {})[int(expert), matrix] = tensors.pop(name)
    for suffix, own in parts.items():
        bits = {
            key: tensor.view(torch.uint8) if "float8" in str(tensor.dtype) else tensor for key, tensor in own.items()
        }
        dtype = own[0, "down_proj"].dtype
        both = [
            torch.cat([bits[e, "gate_proj"], bits[e, "up_proj"]], min(dim, own[e, "up_proj"].ndim - 1))
            for e in range(NUM_EXPERTS)
        ]
        ending = f".{suffix}" if dotted else suffix.removeprefix("weight")
        tensors[f"{PREFIX}.gate_up_proj{ending}"] = torch.stack(both).view(dtype)
        tensors[f"{PREFIX}.down_proj{ending}"] = torch.stack([bits[e, "down_proj"] for e in range(NUM_EXPERTS)]).view(
            dtype
        )
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8-tensor", "fp8-compressed-channel", "w8a8", "w4a16-asym"])
def test_stacked_experts_are_those_of_single_tensors(checkpoints, tmp_path, name, dotted):
    directory, _ = checkpoints(name)
    stack(directory, tmp_path / "stacked", dotted)
    for quantization in ("none", "int8"):
        for rank in range(3):
            got, wanted = (load(path, rank, 3, quantization=quantization) for path in (tmp_path / "stacked", directory))
            assert forms(got) == forms(wanted)
            for own, exact in zip(pairs(got), pairs(wanted), strict=True):
                assert all(map(torch.equal, own, exact))


def test_stacked_fp8_of_few_columns_has_blocks_of_its_own_for_gate_and_up(tmp_path):
    """As Transformers writes it: two rows of scales where a block is larger than both."""
    published = Published(*fp8("block"), None)
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", **SHAPE | {"moe_intermediate_size": 44})
    write_published(tmp_path / "model", tmp_path / "twin", published)
    stack(tmp_path / "model", tmp_path / "stacked", dotted=False)
    scales = load_file(tmp_path / "stacked" / "model.safetensors")[f"{PREFIX}.gate_up_proj_scale_inv"]
    assert scales.shape == (NUM_EXPERTS, 2, 1)
    for own, exact in zip(pairs(load(tmp_path / "stacked")), pairs(load(tmp_path / "twin")), strict=True):
        assert all(map(torch.equal, own, exact))


@pytest.mark.parametrize("name", ["w4a16", "fp8"])
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_that_were_left_out_without_a_word_are_values(checkpoints, tmp_path, name, stacked):
    """Configs name the modules that they leave out, and experts are none in Transformers."""
    directory, twin = checkpoints(name)
    tensors = load_file(directory / "model.safetensors")
    plain = {name: tensor for name, tensor in load_file(twin / "model.safetensors").items() if name.startswith(PREFIX)}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    (tmp_path / "mixed").mkdir()
    save_file(tensors | plain, tmp_path / "mixed" / "model.safetensors")
    (tmp_path / "mixed" / "config.json").write_bytes((directory / "config.json").read_bytes())
    folder = tmp_path / "mixed"
    if stacked:
        folder = tmp_path / "stacked"
        stack(tmp_path / "mixed", folder, dotted=False)
    experts = load(folder)
    assert forms(experts) == {None}
    for own, exact in zip(pairs(experts), pairs(load(twin)), strict=True):
        assert all(map(torch.equal, own, exact))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("w8a16", {}, r"gate_up_proj.weight_packed has shape \[3, 1408, 32\], but the config implies \[3, 2816, 16\]"),
        (
            "fp8",
            {"quantization_config": fp8("block")[0] | {"modules_to_not_convert": [".*experts.*"]}},
            r"experts in tensor \S+gate_up_proj are stored in F8_E4M3, and quantization_con",
        ),
        ("fp8", {"num_experts": 4}, r"has shape"),
    ],
)
def test_unknown_stacks_are_refused_in_one_line(checkpoints, tmp_path, name, change, complaint):
    directory, _ = checkpoints(name)
    stack(directory, tmp_path / "stacked", dotted=True, dim=int(name == "w8a16"))
    path = tmp_path / "stacked" / "config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | change).items() if v is not None}))
    with pytest.raises(UserError, match=complaint) as error:
        load(tmp_path / "stacked")
    assert "\n" not in str(error.value)
