"""``make_runner``: a rank's model runner, with the KV cache and the rotary tables of its layout."""

from __future__ import annotations

import logging

from torch import nn

from labinfer.base.cache_sizes import CacheSizes
from labinfer.comm.spmd.devices import torch_device
from labinfer.comm.spmd.topology import Place
from labinfer.functions.functions import Functions
from labinfer.functions.graph import Capture
from labinfer.launch.layout.layout import Layout
from labinfer.worker.accelerator_copies import make_host_copies
from labinfer.worker.kv_cache import KVCacheManager
from labinfer.worker.model_runner import ModelRunner
from labinfer.worker.step_graphs import capture_steps

logger = logging.getLogger(__name__)


def make_runner(
    model: nn.Module,
    layout: Layout,
    place: Place,
    sizes: CacheSizes,
    *,
    functions: Functions,
    capture: Capture | None,
    max_num_batched_tokens: int,
) -> ModelRunner:
    """Allocate the KV cache and the rotary tables of ``model``, and return its runner.

    Args:
        model: the rank's part of the model, loaded.
        capture: captures the steps; None to capture none.
    """
    device = torch_device(layout.devices[place.rank])
    copies = make_host_copies(device)
    cache = KVCacheManager(
        model.cache_specs(),
        sizes,
        block_size=layout.block_size,
        dtype=layout.kv_dtype(place),
        device=device,
        rotary_table=model.rotary_table,
        copies=copies,
    )
    model.make_rotary_tables(sizes.max_model_len, device, max_num_batched_tokens)
    logger.debug("KV cache and rotary tables are allocated")
    return ModelRunner(
        model,
        cache,
        device=device,
        dtype=layout.dtype(place),
        functions=functions,
        around=capture_steps(capture),
        copies=copies,
    )
