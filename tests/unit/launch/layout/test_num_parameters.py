"""Number of parameters of a model, whatever its layout and quantization."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import auto_class, make_checkpoint
from safetensors.torch import load_file

import labinfer
from labinfer.base.config import EngineOptions
from labinfer.comm.spmd.machine import describe_rank
from labinfer.launch.layout.layout import make_layout
from labinfer.models.registry import load_config

DEMO = Path(labinfer.__file__).parent / "assets" / "demo"
ALONE = {"device": "cpu", "quantization": "none"}
SPLIT = {"device": "cpu", "quantization": "int8", "pipeline_parallel_size": 2, "tensor_parallel_size": 2}


def count(directory: Path, num_ranks: int, options: dict) -> int:
    everyone = [describe_rank(rank, rank, "node") for rank in range(num_ranks)]
    return make_layout(EngineOptions.from_flat(options), load_config(directory), everyone).num_parameters


def test_demo_model_has_the_elements_of_its_file():
    elements = sum(tensor.numel() for tensor in load_file(DEMO / "model.safetensors").values())
    assert count(DEMO, 1, ALONE) == count(DEMO, 4, SPLIT) == elements > 2_000_000


@pytest.mark.parametrize("kind", ["llama-untied", "qwen2-tied", "qwen3-moe", "gpt-oss"])
def test_models_have_as_many_as_in_transformers(tmp_path, kind):
    directory = make_checkpoint(tmp_path, kind)
    expected = auto_class(kind).from_pretrained(directory).num_parameters()
    assert count(directory, 1, ALONE) == count(directory, 1, ALONE | {"quantization": "int8"}) == expected
