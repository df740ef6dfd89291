"""Any slice of a tensor in a GGUF file has the values of gguf-py, in the order of the checkpoint that was converted."""

from __future__ import annotations

import itertools
import random

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import code_values, finish, quantize, spread, write_gguf

from labinfer.base.errors import UserError
from labinfer.comm.spmd.topology import shard_range
from labinfer.functions.packed_weight import TABLES
from labinfer.functions.reference.quantized import dequantize, pack_codes
from labinfer.weights.codes import CHUNK, Codes, QuantLayout
from labinfer.weights.formats.mxfp4 import E2M1
from labinfer.weights.gguf import blocks as blocks_module
from labinfer.weights.gguf.config import gguf_config, gguf_generation_config
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.forms import FORMS
from labinfer.weights.gguf.types import TYPES
from labinfer.weights.model_files import open_model
from labinfer.weights.slices import MatrixSlice, MatrixStack, TensorSlice

HEADS, KV_HEADS, HEAD, INPUTS, OUTPUTS = 4, 2, 16, 512, 48
UP, QUERIES = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"


def write(
    path, kind: GGMLQuantizationType, architecture: str = "llama", table=GGMLQuantizationType.F32, **sizes
) -> dict[str, torch.Tensor]:
    """A file with two matrices of random blocks and a norm; returns their values by the checkpoint's names, as they are stored."""
    rng = np.random.default_rng(kind.value)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(INPUTS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, value in sizes.items():
        getattr(writer, name)(value)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    values = {}
    for name, (stored, rows) in {UP: ("blk.0.ffn_up", OUTPUTS), QUERIES: ("blk.0.attn_q", HEADS * HEAD)}.items():
        blocks = rng.integers(0, 256, (rows, INPUTS // size, num_bytes), dtype=np.uint8)
        blocks[:, :, 1::2] &= 0x3F  # scales, and float16 itself, that are finite and positive
        blocks[:, :, -1] &= 0x3F
        data = blocks.reshape(rows, -1)
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            data = rng.standard_normal((rows, INPUTS), dtype=np.float32).astype(
                np.dtype(kind.name.replace("F", "float"))
            )
            writer.add_tensor(f"{stored}.weight", data)
        else:
            writer.add_tensor(f"{stored}.weight", data, raw_dtype=kind)
        values[name] = torch.from_numpy(
            gguf.quants.dequantize(data.view(np.uint8) if data.dtype == np.uint8 else data, kind)
        )
    norm = rng.standard_normal(INPUTS).astype(np.float32)
    writer.add_tensor("blk.0.attn_norm.weight", norm)
    rows = (
        gguf.quants.quantize(np.ones((5, INPUTS), np.float32), table)
        if table.name != "Q6_K"
        else np.ones((5, 420), np.uint8)
    )
    writer.add_tensor("token_embd.weight", rows, raw_dtype=table)
    finish(writer)
    return values | {"model.layers.0.input_layernorm": torch.from_numpy(norm)}


def unrotated(values: torch.Tensor) -> torch.Tensor:
    """Rows of queries as Transformers has them."""
    return values.unflatten(0, (HEADS, HEAD // 2, 2)).transpose(1, 2).flatten(0, 2)


@pytest.mark.parametrize("kind", [GGMLQuantizationType(number) for number in TYPES], ids=lambda kind: kind.name)
def test_any_slice_has_the_values_of_the_reference(tmp_path, kind):
    values = write(tmp_path / "a.gguf", kind)
    checkpoint, rng = open_model(tmp_path / "a.gguf").open_weights(), random.Random(kind.name)
    for name, expected in ((UP, values[UP]), (QUERIES, unrotated(values[QUERIES]))):
        outputs, inputs = expected.shape
        cuts = [((0, outputs), (0, inputs))]
        for ranks in (2, 3):
            cuts += [((0, outputs), columns) for columns in shard_range(inputs, ranks, 16)]
            cuts += [(rows, (0, inputs)) for rows in shard_range(outputs, ranks)]
        for _ in range(20):
            rows, columns = (sorted(rng.sample(range(size + 1), 2)) for size in (outputs, inputs))
            cuts.append((tuple(rows), tuple(columns)))
        for rows, columns in cuts:
            part = expected[slice(*rows), slice(*columns)]
            for dtype in (torch.float32, torch.bfloat16):
                destination = torch.full(part.shape, torch.nan, dtype=dtype)
                matrix = MatrixSlice(
                    name=name, outputs=outputs, inputs=inputs, rows=rows, columns=columns, destination=destination
                )
                checkpoint.load(matrix)
                torch.testing.assert_close(destination, part.to(dtype), rtol=0, atol=0, equal_nan=True)


HALVES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
"""Types whose scales and minima float16 holds; those of the others are products of two numbers."""


@pytest.mark.parametrize("kind", FORMS)
def test_codes_of_any_slice_have_the_values_of_the_reference(tmp_path, kind):
    """Bit for bit; as products read them, but for the last bits of scales and minima that have more than float16."""
    path, rng = tmp_path / "a.gguf", random.Random(kind)
    values = write(path, GGMLQuantizationType[kind])
    checkpoint, formats = open_model(path).open_weights(), open_model(path).formats()
    assert formats.method == "gguf" and not formats.warnings
    for name, expected in ((UP, values[UP]), (QUERIES, unrotated(values[QUERIES]))):
        outputs, inputs = expected.shape
        form = formats(name).form("auto")
        assert form == formats(name).form("int8") and formats(name).form("none") is None
        cuts = [((0, outputs), columns) for ranks in (1, 2, 3) for columns in shard_range(inputs, ranks, 16)]
        for _ in range(20):
            rows, columns = (sorted(rng.sample(range(size + 1), 2)) for size in (outputs, inputs))
            cuts.append((tuple(rows), tuple(columns)))
        for rows, columns in cuts:
            part = expected[slice(*rows), slice(*columns)]
            codes = Codes.empty(form, len(part), columns)
            checkpoint.load(
                MatrixSlice(name=name, outputs=outputs, inputs=inputs, rows=rows, columns=columns, destination=codes)
            )
            decoded = code_values(codes)
            assert torch.equal(decoded, part), (rows, columns)
            packed = pack_codes(codes, torch.float32)
            if kind in HALVES:
                assert torch.equal(dequantize(packed), part), (rows, columns)
                continue
            minima = 0 if codes.minima is None else spread(codes, codes.minima).abs()
            off, most = (dequantize(packed) - part).abs(), 2.0**-11 * (part.abs() + 2 * minima)
            assert (off <= most + 1e-6 * part.abs()).all(), (rows, columns)


def test_table_of_embeddings_has_codes(tmp_path):
    for kind in ("Q8_0", "Q6_K", "Q4_0"):
        write(tmp_path / "a.gguf", GGMLQuantizationType[kind], table=GGMLQuantizationType[kind])
        formats = open_model(tmp_path / "a.gguf").formats()
        assert formats("model.embed_tokens").form("auto") == formats(UP).form("auto") == FORMS[kind]
    assert formats("model.layers.7.mlp.up_proj").form("auto") is None


def test_rank_reads_its_bytes_alone(tmp_path):
    write(tmp_path / "a.gguf", GGMLQuantizationType.Q8_0)
    checkpoint = open_model(tmp_path / "a.gguf").open_weights()
    destination = torch.empty(OUTPUTS // 3, INPUTS)
    part = MatrixSlice(
        name=UP, outputs=OUTPUTS, inputs=INPUTS, rows=(16, 32), columns=(0, INPUTS), destination=destination
    )
    checkpoint.load(part)
    assert checkpoint.bytes_read == 16 * INPUTS // 32 * 34


@pytest.mark.parametrize("form", [None, QuantLayout(bits=8, group=32)])
def test_matrix_is_decoded_in_pieces(tmp_path, monkeypatch, form):
    """However large it is, so that it is never held in floats as a whole."""
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    for name in ("block_count", "context_length", "head_count", "embedding_length"):
        getattr(writer, f"add_{name}")(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((1, 1), np.float32))
    rows, columns = 4096, 1024
    blocks = np.zeros((rows, columns // 32 * 34), np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    finish(writer)
    largest, real = [], blocks_module.DECODERS["Q8_0"]

    def decode(blocks_NB: torch.Tensor):
        largest.append(len(blocks_NB) * 32)
        return real(blocks_NB)

    monkeypatch.setitem(blocks_module.DECODERS, "Q8_0", decode)
    memory = torch.empty(rows, columns) if form is None else Codes.empty(form, rows, (0, columns))
    matrix = MatrixSlice(
        name=UP, outputs=rows, inputs=columns, rows=(0, rows), columns=(0, columns), destination=memory
    )
    open_model(tmp_path / "a.gguf").open_weights().load(matrix)
    assert sum(largest) == rows * columns and max(largest) <= CHUNK


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
def test_gates_and_ups_of_experts_in_one_tensor_are_read_apart(tmp_path, kind):
    """By their ranges of rows on 1, 2 and 3 ranks, as values and as codes."""
    experts, columns, inputs, kind = 3, 20, 512, GGMLQuantizationType[kind]
    writer = GGUFWriter(tmp_path / "a.gguf", "qwen3moe")
    for name in ("block_count", "context_length", "head_count", "embedding_length"):
        getattr(writer, f"add_{name}")(1)
    for name in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
        getattr(writer, f"add_{name}")(experts)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((1, 1), np.float32))
    stored = quantize(np.random.default_rng(4).standard_normal((experts, 2 * columns, inputs), np.float32), kind)
    writer.add_tensor("blk.0.ffn_gate_up_exps.weight", stored, raw_dtype=kind)
    writer.add_tensor(
        "blk.0.ffn_gate_up_exps.bias", np.arange(experts * 2 * columns, dtype=np.float32).reshape(experts, -1)
    )
    finish(writer)
    values = torch.from_numpy(gguf.quants.dequantize(stored, kind)).view(experts, 2, columns, inputs)
    checkpoint, stack = open_model(tmp_path / "a.gguf").open_weights(), "model.layers.0.mlp.experts"
    form = open_model(tmp_path / "a.gguf").formats()(f"{stack}.1.up_proj").form("auto")
    assert form == FORMS.get(kind.name) and not any("gate_up" in name for name in checkpoint.names)
    cuts = [rows for ranks in (1, 2, 3) for rows in shard_range(columns, ranks)]
    for half, part in enumerate(("gate_proj", "up_proj")):
        for expert, rows in itertools.product(range(experts), cuts):
            expected = values[expert, half, slice(*rows)]
            destination = torch.empty_like(expected) if form is None else Codes.empty(form, len(expected), (0, inputs))
            stacked = MatrixStack(
                name=f"{stack}.gate_up_proj",
                shape=(experts, 2 * columns, inputs),
                index=expert,
                first_row=half * columns,
            )
            own = MatrixSlice(
                name=f"{stack}.{expert}.{part}",
                outputs=columns,
                inputs=inputs,
                rows=rows,
                columns=(0, inputs),
                destination=destination,
                stack=stacked,
            )
            checkpoint.load(own)
            assert torch.equal(destination if form is None else code_values(destination), expected)
        bias = checkpoint.read(f"{stack}.{part}.bias", (experts, columns), (), torch.float32)
        assert bias[2].tolist() == [(2 * 2 + half) * columns + row for row in range(columns)]


def test_norm_is_read(tmp_path):
    values = write(tmp_path / "a.gguf", GGMLQuantizationType.Q4_0)
    name = "model.layers.0.input_layernorm"
    checkpoint = open_model(tmp_path / "a.gguf").open_weights()
    assert checkpoint.shape(f"{name}.weight") == (INPUTS,)
    assert torch.equal(checkpoint.read(f"{name}.weight", (INPUTS,), ((3, 70),), torch.float32), values[name][3:70])
    assert f"{name}.weight" in checkpoint.names and f"{UP}.weight" in checkpoint.names


def test_missing_and_misshapen_tensors_are_refused(tmp_path):
    write(tmp_path / "a.gguf", GGMLQuantizationType.F16)
    checkpoint = open_model(tmp_path / "a.gguf").open_weights()
    destination = torch.empty(4)
    with pytest.raises(UserError, match=r"no tensor for model\.norm\.weight of shape \[4\]"):
        checkpoint.check(TensorSlice(name="model.norm.weight", shape=(4,), destination=destination))
    with pytest.raises(
        UserError, match=r"tensor blk\.0\.attn_norm\.weight has shape \[512\], but the metadata implies \[4\]"
    ):
        checkpoint.check(TensorSlice(name="model.layers.0.input_layernorm.weight", shape=(4,), destination=destination))


def test_file_that_is_cut_short_later_is_refused(tmp_path):
    write(tmp_path / "a.gguf", GGMLQuantizationType.F16)
    checkpoint = open_model(tmp_path / "a.gguf").open_weights()
    with open(tmp_path / "a.gguf", "r+b") as file:
        file.truncate(2000)
    part = MatrixSlice(
        name=UP,
        outputs=OUTPUTS,
        inputs=INPUTS,
        rows=(0, OUTPUTS),
        columns=(0, INPUTS),
        destination=torch.empty(OUTPUTS, INPUTS),
    )
    with pytest.raises(UserError, match="is truncated, or cannot be read"):
        checkpoint.load(part)


def test_config_is_the_checkpoints(tmp_path):
    """Of each family, as far as the code reads it."""
    from checkpoints import make_checkpoint

    from labinfer.models.registry import load_config

    for kind in ("llama-untied", "llama-tied-biased", "qwen2-tied", "qwen2-untied-sharded"):
        directory = make_checkpoint(tmp_path / kind, kind)
        own, made = load_config(directory), load_config(write_gguf(directory, tmp_path / f"{kind}.gguf"))
        assert made.architecture == own.architecture and made.num_layers == own.num_layers
        for name in ("vocab_size", "hidden_size", "max_position", "tied_embeddings", "dtype", "norm_offset"):
            assert getattr(made, name) == getattr(own, name), (kind, name)
        assert made.eos_token_ids == own.eos_token_ids == (1,)
        assert made.norm_eps == pytest.approx(own.norm_eps)
        assert made.layers[0].mlp == own.layers[0].mlp
        for field in ("num_heads", "num_kv_heads", "head_size", "qkv_bias", "out_bias", "window"):
            assert getattr(made.layers[0].mixer, field) == getattr(own.layers[0].mixer, field), (kind, field)


def test_sampling_is_what_the_file_recommends(tmp_path):
    path = tmp_path / "a.gguf"
    write(path, GGMLQuantizationType.F16)
    assert gguf_generation_config(GgufFile(path)) == {}
    more = {"add_sampling_temp": 0.5, "add_sampling_top_k": 7, "add_sampling_top_p": 0.25}
    write(path, GGMLQuantizationType.F16, **more)
    assert gguf_generation_config(GgufFile(path)) == {"temperature": 0.5, "top_k": 7, "top_p": 0.25}


REFUSED = {
    "architecture": ("mamba", {}, "architecture 'mamba' of GGUF files is not supported; supported are llama, "),
    "mmproj": (
        "clip",
        {},
        r"a\.gguf is an encoder of images or audio \(mmproj\), not a model; give --model the model's own",
    ),
    "experts": ("qwen2", {"add_expert_count": 8}, "architecture 'qwen2' with experts is not supported"),
    "rope": (
        "qwen2",
        {"add_rope_scaling_type": gguf.RopeScalingType.LONGROPE},
        "scaling.type 'longrope' is not supported",
    ),
    "values": ("qwen2", {"add_value_length": 8}, "value_length differs from key_length"),
    "by layer": ("qwen2", {"add_feed_forward_length": [8, 9]}, "feed_forward_length differs between layers"),
}


@pytest.mark.parametrize("architecture, sizes, complaint", REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path, architecture, sizes, complaint):
    write(tmp_path / "a.gguf", GGMLQuantizationType.F16, architecture, **sizes)
    with pytest.raises(UserError, match=complaint) as refusal:
        gguf_config(GgufFile(tmp_path / "a.gguf"))
    assert "a.gguf" in str(refusal.value)


def test_directory_of_files_names_one(tmp_path):
    write(tmp_path / "b.gguf", GGMLQuantizationType.F16)
    write(tmp_path / "a.gguf", GGMLQuantizationType.F16)
    with pytest.raises(
        UserError, match=r"has no config\.json, but GGUF files; give one of them, such as --model .*a\.gguf$"
    ):
        open_model(tmp_path).config()


def test_token_that_ends_a_turn_is_an_end(tmp_path):
    more = {"add_token_list": ["a", "<|im_end|>", "<|eot_id|>"], "add_token_types": [1, 3, 1], "add_eos_token_id": 0}
    write(tmp_path / "a.gguf", GGMLQuantizationType.F16, **more)
    assert gguf_config(GgufFile(tmp_path / "a.gguf"))["eos_token_id"] == [0, 1]


def test_tables_of_kernels_are_those_of_the_types():
    assert TABLES["e2m1"] == E2M1 and TABLES["iq4"] == blocks_module.FOUR_BITS
