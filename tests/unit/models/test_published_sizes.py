"""Published configs give models of the sizes that are published: parameters, and bytes of a token in the cache."""

from __future__ import annotations

import json

import pytest
import torch
from published_configs import LARGER, PUBLISHED

from labinfer.comm.local import LocalCommunicator
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.launch.layout.stage_shapes import StageShapes
from labinfer.launch.providers import reference_registry
from labinfer.models.config import ModelConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.registry import load_config, model_class

SIZES = {
    "google/gemma-3-270m-it": (268_098_176, 18 * 1024, 15 * 1024),
    "google/gemma-3-1b-it": (999_885_952, 26 * 1024, 22 * 1024),
    "google/gemma-3-4b-it": (3_880_263_168, 34 * 4096, 29 * 4096),
    "openai/gpt-oss-20b": (20_914_757_184, 24 * 2048, 12 * 2048),
    "deepseek-ai/DeepSeek-V2-Lite": (15_706_484_224, 27 * 1152, 0),
    "deepseek-ai/DeepSeek-V3": (671_026_419_200, 61 * 1152, 0),
    "moonshotai/Kimi-K2-Instruct": (1_026_408_232_448, 61 * 1152, 0),
    "zai-org/GLM-4.7-Flash": (29_943_393_920, 47 * 1152, 0),
    "openbmb/MiniCPM3-4B": (4_073_875_968, 62 * 576, 0),
}
"""Parameters, biases of routers included, without layers that guess tokens ahead; bytes of a token in bfloat16, and those of them in layers with
a window. The parameters are those of Transformers' models of the same configs."""

ONE_EXPERT = (".experts.gate_up", ".experts.down")


def whole_model(config: ModelConfig) -> StageShapes:
    """On one rank, in bfloat16."""
    context = StageContext(
        tp=TensorParallelCommunicator(LocalCommunicator(rank=0, size=1)),
        functions=reference_registry().select(torch.device("cpu"), torch.bfloat16),
        dtype=torch.bfloat16,
        first_layer=0,
        last_layer=config.num_layers,
        is_first=True,
        is_last=True,
        form=lambda matrix: config.formats(matrix).form("none"),
        experts="columns",
        names=model_class(config).names,
    )
    return StageShapes(config, context, torch.bfloat16)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_and_cache_bytes_are_those_that_are_published(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps((PUBLISHED | LARGER)[name]))
    stage = whole_model(load_config(tmp_path))
    others = sum(
        parameter.numel()
        for name, parameter in stage.model.named_parameters()
        if not name.endswith(ONE_EXPERT)  # as it is read, before it goes to the others
    )
    experts = stage.expert_bytes // torch.bfloat16.itemsize
    assert (others + experts, stage.bytes_per_token, stage.window_bytes_per_token) == SIZES[name]
