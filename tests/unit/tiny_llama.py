"""A small Llama checkpoint written by hand, and one rank's share of it."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from labinfer.comm.local import LocalCommunicator
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.layer_cache import LayerCache
from labinfer.launch.providers import reference_registry
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch
from labinfer.models.registry import load_config, model_class
from labinfer.weights.checkpoint_names import CheckpointNames
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.loader import load_weights, weight_slices
from labinfer.weights.model_files import open_model
from labinfer.weights.slices import MatrixSlice, TensorSlice

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


def model_of(
    config,
    *,
    tp_rank=0,
    tp_size=1,
    layers=None,
    dtype=torch.float32,
    names=None,
    quantization="auto",
    registry=None,
    comm=None,
    experts="columns",
):
    """One rank's share, uninitialised; ``layers`` (begin, end) makes it a stage, ``names`` another family.

    Args:
        registry: that of the functions; the reference's by default.
        comm: of the ranks; by default one that only says how many there are.
    """
    names = names or CheckpointNames()
    begin, end = layers or (0, config.num_layers)
    tp = TensorParallelCommunicator(comm or LocalCommunicator(rank=tp_rank, size=tp_size))
    rounding = "none" if quantization == "auto" else quantization
    functions = (registry or reference_registry()).select(torch.device("cpu"), dtype, quantization=rounding)
    ctx = StageContext(
        tp=tp,
        functions=functions,
        dtype=dtype,
        first_layer=begin,
        last_layer=end,
        is_first=begin == 0,
        is_last=end == config.num_layers,
        form=lambda matrix: config.formats(matrix).form(quantization),
        experts=experts,
        names=names,
    )
    model = model_class(config)(config, ctx)
    model.names = names
    return model


class SliceRecorder:
    """A ``TensorReader`` that notes what it is to read."""

    def __init__(self):
        self.slices = []

    def read_into(self, part: TensorSlice) -> None:
        self.slices.append(part)


def plain_slices(model) -> list[TensorSlice]:
    """The slices of a plain checkpoint's tensors that fill a model."""
    recorder = SliceRecorder()
    for part in weight_slices(model):
        if isinstance(part, MatrixSlice):
            PlainFormat().read(recorder, part)
        else:
            recorder.read_into(part)
    return recorder.slices


def random_tensors(config) -> dict[str, torch.Tensor]:
    """What a whole checkpoint of this config holds."""
    torch.manual_seed(0)
    return {part.name: torch.randn(part.shape) for part in plain_slices(model_of(config))}


def write(directory, tensors=None, **changes):
    """A checkpoint directory; ``changes`` go into its config."""
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    if tensors is None:
        tensors = random_tensors(load_config(directory))
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors


def load(directory, **share):
    checkpoint = open_model(directory).open_weights()
    model = model_of(load_config(directory), **share)
    load_weights(model, checkpoint, torch.device("cpu"), lambda done, total: None)
    return model, checkpoint


def prompt_logits(model, num_tokens: int = 9) -> torch.Tensor | None:
    """Of a prompt's tokens, by a model of one layer."""
    model.make_rotary_tables(16, torch.device("cpu"))
    attention = model.model.layers["0"].self_attn
    caches = [LayerCache(*(torch.zeros(1, 16, attention.shard.num_kv, 32) for _ in range(2)))]
    positions = torch.arange(num_tokens)
    batch = ModelInputBatch(
        token_ids_T=positions * 3,
        positions_T=positions,
        attention=AttentionBatch.build([0, num_tokens], [num_tokens], [[0]], torch.device("cpu")),
        slots_T=positions,
        sample_rows_B=positions,
        prompt_rows=[],
        pooled=[],
    )
    with torch.inference_mode():
        return model.logits(model(batch, None, caches))
