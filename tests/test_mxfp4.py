"""Experts in MXFP4, as gpt-oss is published, against gguf-py's values of the same numbers."""

from __future__ import annotations

import json
import random
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, randomize, write_tokenizer
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf_files import code_values
from golden import PROMPTS, greedy, recorded, relative_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from labinfer import LLM, UserError
from labinfer.comm.spmd.topology import shard_range
from labinfer.weights.codes import Codes
from labinfer.weights.model_files import open_model
from labinfer.weights.slices import MatrixSlice, MatrixStack

HIDDEN, COLUMNS, EXPERTS = 64, 96, 7
"""Two tensor-parallel ranks cut the columns of the experts inside of a group."""
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
LAYER = "model.layers.1.mlp.experts"


def values_of(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """What the numbers stand for, by gguf-py, in whose blocks the second half of the inputs is in the upper halves of bytes."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    halves = codes[..., :16] | codes[..., 16:] << 4
    stored = torch.cat((exponents.unsqueeze(-1), halves), dim=-1)
    return torch.from_numpy(dequantize(stored.numpy(), GGMLQuantizationType.MXFP4).astype(np.float32)).flatten(-2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """The same model with experts in values, and in MXFP4."""
    plain, packed = (tmp_path_factory.mktemp("mxfp4") / name for name in ("plain", "packed"))
    torch.manual_seed(0)
    config = CONFIGS["gpt-oss"]()
    config.update({"hidden_size": HIDDEN, "intermediate_size": COLUMNS})
    model = AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.save_pretrained(plain)
    write_tokenizer(plain)
    tensors = load_file(plain / "model.safetensors")
    coded = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(121, 125, (count, outputs, inputs // 32), dtype=torch.uint8)
        tensors[name] = values_of(blocks, exponents).transpose(1, 2).contiguous()
        coded |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        del coded[name]
    save_file(tensors, plain / "model.safetensors")
    shutil.copytree(plain, packed)
    save_file(coded, packed / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(values | {"quantization_config": METHOD}))
    return plain, packed


PROJECTIONS = (
    ("gate_proj", "gate_up_proj", COLUMNS, HIDDEN, 0),
    ("up_proj", "gate_up_proj", COLUMNS, HIDDEN, COLUMNS),
    ("down_proj", "down_proj", HIDDEN, COLUMNS, 0),
)


@pytest.mark.parametrize(("name", "stack", "outputs", "inputs", "first_row"), PROJECTIONS)
def test_any_slice_has_the_values_of_the_reference(checkpoints, name, stack, outputs, inputs, first_row):
    plain, packed = checkpoints
    stored = load_file(plain / "model.safetensors")[f"{LAYER}.{stack}"]
    checkpoint, form = open_model(packed).open_weights(), open_model(packed).formats()(f"{LAYER}.3.{name}").form("auto")
    rng, height = random.Random(name), 2 * outputs if stack == "gate_up_proj" else outputs
    expected = stored[3].T[first_row // outputs :: height // outputs]
    cuts = [((0, outputs), columns) for ranks in (1, 2, 3) for columns in shard_range(inputs, ranks, 16)]
    cuts += [tuple(tuple(sorted(rng.sample(range(size + 1), 2))) for size in (outputs, inputs)) for _ in range(20)]
    for (rows, columns), dtype in product(cuts, (torch.float32, torch.bfloat16, None)):
        part = expected[slice(*rows), slice(*columns)]
        codes = Codes.empty(form, len(part), columns)
        destination = codes if dtype is None else torch.full(part.shape, torch.nan, dtype=dtype)
        matrix = MatrixSlice(
            name=f"{LAYER}.3.{name}",
            outputs=outputs,
            inputs=inputs,
            rows=rows,
            columns=columns,
            destination=destination,
            stack=MatrixStack(
                name=f"{LAYER}.{stack}",
                shape=(EXPERTS, height, inputs),
                index=3,
                first_row=first_row,
                is_transposed=True,
            ),
        )
        checkpoint.check(matrix)
        checkpoint.load(matrix)
        if dtype is None:
            destination = code_values(codes)
        assert torch.equal(destination, part.to(destination.dtype)), (rows, columns, dtype)


def test_logits_are_those_of_the_values(checkpoints):
    plain, packed = checkpoints
    with recorded(plain) as (llm, expected):
        tokens = [output.token_ids for output in greedy(llm, PROMPTS[:4], 8)]
    with recorded(packed, quantization="none") as (llm, rows):
        assert [output.token_ids for output in greedy(llm, PROMPTS[:4], 8)] == tokens
        assert rows.keys() == expected.keys()
        assert all(torch.equal(rows[prefix], expected[prefix]) for prefix in rows)


def test_codes_are_as_near_as_rounded_activations(checkpoints):
    """Weights lose nothing as codes, so that only activations are rounded, to 8 bits."""
    plain, packed = checkpoints
    (prompt,) = [prompt for prompt in PROMPTS if len(prompt) > 16][:1]
    with recorded(plain) as (llm, expected):
        greedy(llm, [prompt], 1)
    with recorded(packed) as (llm, rows):
        greedy(llm, [prompt], 1)
    assert rows.keys() == expected.keys()
    assert all(0 < relative_error(rows[prefix], expected[prefix]) < 0.03 for prefix in rows)


def test_experts_that_are_neither_are_refused(checkpoints, tmp_path):
    """In a tensor of 8 bits, gate and up would not be told apart."""
    plain, other = checkpoints[0], tmp_path / "other"
    shutil.copytree(plain, other)
    tensors = load_file(plain / "model.safetensors")
    small = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items() if name.endswith("_proj")}
    save_file(tensors | small, other / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match=r"experts in tensor .*_proj are neither in .* nor in MXFP4"):
        LLM(str(other), num_kv_blocks=60)
