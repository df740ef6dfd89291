"""Checkpoints as they are published, made by the formulas of their papers and documents, and the values they stand for.

Nothing here is taken from the package: codes, scales and zero points are random, the values follow from them by the formula in
float64, and packing sets one code after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def pack(codes: torch.Tensor, bits: int, dim: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Words of 32 bits along a dimension: of the codes of a word, code i is in place ``places[i]``, counted from the lowest."""
    per_word = 32 // bits
    moved = codes.movedim(dim, 0).long()
    missing = -len(moved) % per_word
    moved = torch.cat([moved, moved.new_zeros(missing, *moved.shape[1:])])
    words = torch.zeros(len(moved) // per_word, *moved.shape[1:], dtype=torch.int64)
    for i in range(per_word):
        words += moved[i::per_word] * 2 ** (bits * (places[i] if places else i))
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(0, dim).contiguous()


def groups_of(inputs: int, size: int) -> torch.Tensor:
    """The group of each input."""
    return torch.arange(inputs) // (size if size > 0 else inputs)


@dataclass
class Published:
    """A format: ``store`` makes a matrix of random codes, as (tensors by suffix, values)."""

    quantization_config: dict
    store: Callable[[int, int], tuple[Tensors, torch.Tensor]]
    form: tuple[int, int, bool] | None
    """Bits, group and zero points of the form in which it is to be held; None for values."""
    exact: bool = True
    """Whether that holds the values exactly."""
    linears: tuple[str, ...] = LINEARS
    others: dict[str, Callable[[int, int], tuple[Tensors, torch.Tensor]]] = field(default_factory=dict)
    """What some projections are stored by instead."""


def random_scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (0.01 + 0.02 * torch.rand(*shape)).to(dtype)


def values_of(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(q - z) · s with codes (outputs, inputs), zeros and scales (outputs, groups)."""
    return ((codes.double() - zeros.double()[:, groups]) * scales.double()[:, groups]).float()


def gptq(bits: int, size: int, *, sym: bool, version: str = "gptq", act_order: bool = False, is_trivial: bool = False):
    """``is_trivial``: inputs are in order after all."""

    def store(outputs: int, inputs: int):
        groups = groups_of(inputs, size)
        count = int(groups.max()) + 1
        if act_order and not is_trivial:
            groups = groups[torch.randperm(inputs)]
        codes = torch.randint(0, 2**bits, (outputs, inputs))
        zeros = torch.full((outputs, count), 2 ** (bits - 1)) if sym else torch.randint(0, 2**bits, (outputs, count))
        scales = random_scales(outputs, count) / 2 ** (bits - 4)
        stored = (zeros - 1) % 2**bits if version == "gptq" else zeros
        tensors = {
            "qweight": pack(codes, bits, 1).T.contiguous(),
            "qzeros": pack(stored, bits, 0).T.contiguous(),
            "scales": scales.T.contiguous(),
            "g_idx": groups.to(torch.int32),
        }
        return tensors, values_of(codes, zeros, scales, groups)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": sym,
        "desc_act": act_order,
        "checkpoint_format": version,
        "lm_head": False,
    }
    return config, store


AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output 8c + i is in nibble ``AWQ_PLACES[i]`` of word c."""


def awq(size: int):
    def store(outputs: int, inputs: int):
        groups = groups_of(inputs, size)
        count = int(groups.max()) + 1
        codes, zeros = torch.randint(0, 16, (outputs, inputs)), torch.randint(0, 16, (outputs, count))
        scales = random_scales(outputs, count)
        tensors = {
            "qweight": pack(codes, 4, 0, AWQ_PLACES).T.contiguous(),
            "qzeros": pack(zeros, 4, 0, AWQ_PLACES).T.contiguous(),
            "scales": scales.T.contiguous(),
        }
        return tensors, values_of(codes, zeros, scales, groups)

    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": size, "zero_point": True}
    return config | {"modules_to_not_convert": None}, store


def compressed(layout: str, weights: dict, *, ignore: tuple[str, ...] = ("lm_head", r"re:.*mlp\.gate$")) -> dict:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": scheme},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def packed(
    bits: int,
    size: int,
    *,
    sym: bool,
    dtype: torch.dtype = torch.bfloat16,
    act_order: bool = False,
    is_trivial: bool = False,
):
    """``is_trivial``: as for ``gptq``."""

    def store(outputs: int, inputs: int):
        groups = groups_of(inputs, size)
        count = int(groups.max()) + 1
        if act_order and not is_trivial:
            groups = groups[torch.randperm(inputs)]
        half = 2 ** (bits - 1)
        codes = torch.randint(-half, half, (outputs, inputs))
        zeros = torch.zeros(outputs, count).long() if sym else torch.randint(-half, half, (outputs, count))
        scales = random_scales(outputs, count, dtype=dtype) / 2 ** (bits - 4)
        tensors = {
            "weight_packed": pack(codes + half, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not sym:
            tensors["weight_zero_point"] = pack(zeros + half, bits, 0)
        if act_order:
            tensors["weight_g_idx"] = groups.to(torch.int32)
        return tensors, values_of(codes, zeros, scales, groups)

    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group" if size > 0 else "channel"}
    order = {"actorder": "group"} if act_order else {}
    return compressed("pack-quantized", weights | {"group_size": size if size > 0 else None} | order), store


def whole(strategy: str, *, sym: bool = True, size: int = 0):
    """W8A8."""

    def store(outputs: int, inputs: int):
        groups = groups_of(inputs, size)
        count = int(groups.max()) + 1
        shape = (1,) if strategy == "tensor" else (outputs, count)
        codes, zeros = torch.randint(-128, 128, (outputs, inputs)), torch.zeros(shape).long()
        if not sym:
            zeros = torch.randint(-128, 128, shape)
        scales = torch.rand(*shape) * 0.002 + 0.001 if size == 0 else random_scales(*shape) / 16
        tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
        if not sym:
            tensors["weight_zero_point"] = zeros.to(torch.int8)
        spread = (outputs, count)
        return tensors, values_of(codes, zeros.expand(spread), scales.expand(spread), groups)

    weights = {"num_bits": 8, "type": "int", "symmetric": sym, "strategy": strategy, "group_size": size or None}
    config = compressed("int-quantized", weights)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    return config, store


def float8(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every finite number of e4m3 and its value: sign, 4 bits of exponent with bias 7, 3 of fraction."""
    bits = torch.randint(0, 256, (outputs, inputs))
    bits = torch.where(bits % 128 == 127, bits - 1, bits)
    exponents, fractions = (bits // 8 % 16).double(), (bits % 8).double() / 8
    size = torch.where(exponents > 0, 2 ** (exponents - 7) * (1 + fractions), 2.0**-6 * fractions)
    return bits.to(torch.uint8).view(torch.float8_e4m3fn), torch.where(bits >= 128, -size, size)


def normal_float8(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal weights rounded to e4m3, the largest near its end, as a quantiser leaves them."""
    stored = (torch.randn(outputs, inputs) * 90).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, stored.double()


def fp8(
    strategy: str,
    *,
    is_compressed: bool = False,
    scale_name: str = "",
    scale_dtype: torch.dtype = torch.float32,
    scale_shape: tuple[int, ...] | None = None,
    activation: str = "",
    says_block: bool = True,
    numbers: Callable = float8,
):
    """
    Args:
        scale_name, scale_dtype, scale_shape: others than usual.
        activation: name of the scale of activations, where that is static.
        says_block: whether the config has the size of blocks, or null where there are none.
    """
    name = scale_name or ("weight_scale" if is_compressed or strategy != "block" else "weight_scale_inv")

    def store(outputs: int, inputs: int):
        stored, values = numbers(outputs, inputs)
        shape = {"tensor": (1,), "channel": (outputs, 1), "block": (-(-outputs // 128), -(-inputs // 128))}[strategy]
        if scale_dtype in (torch.uint8, torch.float8_e8m0fnu):
            exponents = torch.randint(110, 125, shape)
            scales, stored_scales = 2.0 ** (exponents.double() - 127), exponents.to(torch.uint8).view(scale_dtype)
        else:
            stored_scales = ((torch.rand(*shape) + 0.5) / 2000).to(scale_dtype)
            scales = stored_scales.double()
        by_output = torch.arange(outputs) // 128 if strategy == "block" else torch.arange(outputs)
        by_input = torch.arange(inputs) // 128 if strategy == "block" else torch.zeros(inputs).long()
        spread = scales.view(1, 1).expand(outputs, 1) if strategy == "tensor" else scales
        values = (values * spread[by_output][:, by_input]).float()
        tensors = {
            "weight": stored,
            name: stored_scales.reshape(scale_shape) if scale_shape is not None else stored_scales,
        }
        return tensors | ({activation: torch.rand(1)} if activation else {}), values

    if is_compressed:
        block = {"block_structure": [128, 128]} if strategy == "block" else {}
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy} | block
        return compressed("float-quantized", weights), store
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static" if activation else "dynamic"}
    block = {"weight_block_size": [128, 128] if strategy == "block" else None} if says_block else {}
    return config | block, store


FLOATS_4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(2).double() * torch.tensor([1.0] * 8 + [-1.0] * 8)
"""The numbers of e2m1, sign last."""


def floats4(group: int, *, whole: float = 1.0, is_modelopt: bool = False, as_bytes: bool = False):
    """NVFP4 with groups of 16, or MXFP4 with groups of 32.

    Args:
        whole: the scale of the matrix.
        as_bytes: whether the scales of groups are stored as bytes.
    """

    def store(outputs: int, inputs: int):
        codes = torch.randint(0, 16, (outputs, inputs))
        if group == 16:
            stored, scales = float8(outputs, inputs // group)
            stored = (stored.view(torch.uint8) & 127).view(torch.float8_e4m3fn)
            scale = torch.tensor([whole])
            scales = scales.abs().float() * scale if is_modelopt else scales.abs().float() / scale
            names = {"weight_scale_2": scale, "input_scale": torch.rand(1)}
            if not is_modelopt:
                names = {"weight_global_scale": scale, "input_global_scale": torch.rand(1)}
        else:
            exponents = torch.randint(110, 125, (outputs, inputs // group))
            stored, scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu), 2.0 ** (exponents.double() - 127)
            names = {}
        halves = codes.to(torch.uint8)
        tensors = {
            "weight" if is_modelopt else "weight_packed": halves[:, 0::2] | halves[:, 1::2] << 4,
            "weight_scale": stored.view(torch.uint8) if as_bytes else stored,
        }
        values = FLOATS_4[codes] * scales.double()[:, torch.arange(inputs) // group]
        return tensors | names, values.float()

    if is_modelopt:
        ignored = ["lm_head", "*.mlp.gate"]
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ignored}, store
    name, strategy = ("nvfp4-pack-quantized", "tensor_group") if group == 16 else ("mxfp4-pack-quantized", "group")
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}
    return compressed(name, weights), store


def mxfp8(*, is_compressed: bool = False):
    def store(outputs: int, inputs: int):
        stored, values = float8(outputs, inputs)
        exponents = torch.randint(110, 125, (outputs, inputs // 32))
        values = values * (2.0 ** (exponents.double() - 127))[:, torch.arange(inputs) // 32]
        scale_name = "weight_scale" if is_compressed else "weight_scale_inv"
        return {"weight": stored, scale_name: exponents.to(torch.uint8)}, values.float()

    if is_compressed:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
        return compressed("mxfp8-quantized", weights), store
    return {"quant_method": "mxfp8", "fmt": "e4m3", "weight_block_size": [1, 32]}, store


def _mixed_modelopt() -> Published:
    """``quantized_layers``: k_proj is plain, gate_proj in FP8."""
    linears = tuple(name for name in LINEARS if name != "k_proj")
    parts = {name: "self_attn" if name in LINEARS[:4] else "mlp" for name in linears}
    layers = {
        f"model.layers.{layer}.{parts[name]}.{name}": {"quant_algo": "FP8" if name == "gate_proj" else "NVFP4"}
        for layer in range(2)
        for name in linears
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    fp8_store = fp8("tensor", scale_name="weight_scale", scale_shape=(), activation="input_scale")[1]
    store = floats4(16, whole=2.0**-9, is_modelopt=True)[1]
    return Published(config, store, (4, 16, False), linears=linears, others={"gate_proj": fp8_store})


def _mixed_gptq() -> Published:
    """``dynamic``: k_proj is plain, gate_proj in 8 bits, up_proj with other groups."""
    config, store = gptq(4, 128, sym=True)
    rules = {
        r"-:.*\.k_proj": {},
        r"+:.*\.gate_proj": {"bits": 8},
        r".*\.up_proj": {"group_size": 32, "sym": False},
    }
    others = {"gate_proj": gptq(8, 128, sym=True)[1], "up_proj": gptq(4, 32, sym=False)[1]}
    linears = tuple(name for name in LINEARS if name != "k_proj")
    return Published(config | {"dynamic": rules}, store, (4, 128, False), linears=linears, others=others)


PUBLISHED: dict[str, Published] = {
    "gptq-sym": Published(*gptq(4, 128, sym=True), (4, 128, False)),
    "gptq-sym-32-v2": Published(*gptq(4, 32, sym=True, version="gptq_v2"), (4, 32, False)),
    "gptq-asym": Published(*gptq(4, 128, sym=False), (4, 128, True)),
    "gptq-asym-64-v2": Published(*gptq(4, 64, sym=False, version="gptq_v2"), (4, 64, True)),
    "gptq-channel": Published(*gptq(4, -1, sym=True), (4, 128, False)),
    "gptq-8": Published(*gptq(8, 128, sym=True), (8, 128, False)),
    "gptq-8-asym": Published(*gptq(8, 32, sym=False), (8, 32, True)),
    "gptq-8-channel": Published(*gptq(8, -1, sym=True), (8, 0, False)),
    "gptq-act-order": Published(*gptq(4, 128, sym=True, act_order=True), (8, 128, False), exact=False),
    "gptq-act-order-asym": Published(*gptq(8, 64, sym=False, act_order=True), (8, 128, False), exact=False),
    "gptq-trivial-order": Published(*gptq(4, 128, sym=True, act_order=True, is_trivial=True), (4, 128, False)),
    "gptq-act-order-channel": Published(*gptq(4, -1, sym=False, act_order=True), (4, 128, True)),
    "gptq-mixed": _mixed_gptq(),
    "awq": Published(*awq(128), (4, 128, True)),
    "awq-32": Published(*awq(32), (4, 32, True)),
    "awq-channel": Published(*awq(-1), (4, 128, True)),
    "w4a16": Published(*packed(4, 128, sym=True), (4, 128, False)),
    "w4a16-32-half": Published(*packed(4, 32, sym=True, dtype=torch.float16), (4, 32, False)),
    "w4a16-asym": Published(*packed(4, 64, sym=False), (4, 64, True)),
    "w4a16-channel": Published(*packed(4, -1, sym=True), (4, 128, False)),
    "w4a16-channel-asym": Published(*packed(4, -1, sym=False), (4, 128, True)),
    "w4a16-act-order": Published(*packed(4, 128, sym=True, act_order=True), (8, 128, False), exact=False),
    "w4a16-trivial-order": Published(*packed(4, 128, sym=True, act_order=True, is_trivial=True), (4, 128, False)),
    "w8a16": Published(*packed(8, 128, sym=True), (8, 128, False)),
    "w8a16-channel": Published(*packed(8, -1, sym=True), (8, 0, False)),
    "w8a8": Published(*whole("channel"), (8, 0, False)),
    "w8a8-asym": Published(*whole("channel", sym=False), (8, 128, True), exact=False),
    "w8a8-tensor": Published(*whole("tensor"), (8, 0, False)),
    "w8a8-group": Published(*whole("group", size=128), (8, 128, False)),
    "fp8": Published(*fp8("block"), None),
    "fp8-tensor": Published(*fp8("tensor"), None),
    "fp8-powers": Published(*fp8("block", scale_dtype=torch.float8_e8m0fnu), None),
    "fp8-powers-as-bytes": Published(*fp8("block", scale_name="scale", scale_dtype=torch.uint8), None),
    "fp8-unsaid-blocks": Published(*fp8("block", scale_dtype=torch.bfloat16, says_block=False), None),
    "fp8-static": Published(*fp8("tensor", activation="input_scale", says_block=False), None),
    "fp8-mistral": Published(
        *fp8(
            "tensor",
            scale_name="weight_scale_inv",
            scale_dtype=torch.bfloat16,
            scale_shape=(),
            activation="activation_scale",
        ),
        None,
    ),
    "fp8-mistral-blocks": Published(*fp8("block", scale_name="qscale_weight", activation="qscale_act"), None),
    "fp8-normal": Published(*fp8("block", numbers=normal_float8), None),
    "fp8-compressed-channel": Published(*fp8("channel", is_compressed=True), None),
    "fp8-compressed-block": Published(*fp8("block", is_compressed=True), None),
    "nvfp4": Published(*floats4(16, whole=2.0**9), (4, 16, False)),
    "nvfp4-any-scale": Published(*floats4(16, whole=777.7), (4, 16, False), exact=False),
    "nvfp4-modelopt": Published(*floats4(16, whole=1.375 / 512, is_modelopt=True, as_bytes=True), (4, 16, False)),
    "nvfp4-modelopt-mixed": _mixed_modelopt(),
    "mxfp4-packed": Published(*floats4(32), (4, 32, False)),
    "mxfp8": Published(*mxfp8(), None),
    "mxfp8-compressed": Published(*mxfp8(is_compressed=True), None),
}
"""Scales of 8 bits in float32 are exact only where they are one for each output."""


def write_published(directory: Path, twin: Path, published: Published) -> Tensors:
    """Replace the linear layers of the plain checkpoint in ``directory``, and write the same values as a plain one into ``twin``.

    Returns:
        The quantised checkpoint's tensors.
    """
    files = sorted(directory.glob("*.safetensors"))
    plain = {name: tensor.float() for path in files for name, tensor in load_file(path).items()}
    stored = dict(plain)
    torch.manual_seed(1)
    for name in list(plain):
        matrix = name.removesuffix(".weight")
        linear = matrix.rpartition(".")[2]
        if plain[name].ndim == 2 and linear in published.linears:
            tensors, plain[name] = published.others.get(linear, published.store)(*plain[name].shape)
            del stored[name]
            stored |= {f"{matrix}.{suffix}": tensor for suffix, tensor in tensors.items()}
    twin.mkdir()
    for path in set(directory.iterdir()) - set(files):
        (twin / path.name).write_bytes(path.read_bytes())
    for path in files:
        path.unlink()
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": published.quantization_config}))
    return stored
