"""make_draft_layout: layout of a draft model, which one rank holds whole (rank 0 or a spare rank)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from labinfer.base.config import EngineOptions, ParallelOptions
from labinfer.base.errors import UserError
from labinfer.comm.spmd.machine import RankInfo
from labinfer.launch.layout.layout import Layout, make_layout
from labinfer.models.config import ModelConfig


def draft_options(options: EngineOptions, name: str, layout: Layout) -> EngineOptions:
    """Options of a draft model: device of its rank, dtype of rank 0. A quantized checkpoint stays quantized; other weights are not quantized.

    Args:
        name: model name or path of the draft model, as in ``--model``.
        layout: layout of the target model.
    """
    dtype = str(layout.dtypes[0]).removeprefix("torch.")
    model = dataclasses.replace(
        options.model,
        model=name,
        dtype=(dtype,),
        quantization=("auto",),
        functions=("auto",),
        autotune="off",
        reproducible="off",
        weights="plain" if options.model.weights == "plain" else "auto",
        max_model_len=0,
        sliding_window=0,
    )
    cache = dataclasses.replace(options.cache, expert_offload=0.0)
    scheduler = dataclasses.replace(options.scheduler, speculative_config=None)
    (device,) = layout.draft_devices.values() or [layout.devices[0]]
    parallel = ParallelOptions(device=(str(device),))
    return dataclasses.replace(options, model=model, parallel=parallel, cache=cache, scheduler=scheduler)


def make_draft_layout(
    options: EngineOptions, config: ModelConfig, layout: Layout, everyone: Sequence[RankInfo]
) -> Layout:
    """Build and check the layout of a draft model on its rank.

    Args:
        options: from ``draft_options``.
        config: config of the draft model.
        layout: layout of the target model.

    Raises:
        UserError: the draft model cannot draft for the target model.
    """
    name, size = options.model.model, layout.config.vocab_size
    if config.vocab_size != size:
        raise UserError(
            f"the draft model {name} has a vocabulary of {config.vocab_size} tokens, the model one of {size}; "
            "choose a draft model with the same vocabulary"
        )
    if config.no_generation:
        raise UserError(f"the draft model {name} {config.no_generation} and cannot draft; choose another one")
    length = min(layout.max_model_len, config.max_position)
    options = dataclasses.replace(options, model=dataclasses.replace(options.model, max_model_len=length))
    (rank,) = layout.draft_devices or [0]
    return make_layout(options, config, [everyone[rank]])
