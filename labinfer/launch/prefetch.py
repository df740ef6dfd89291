"""prefetch_weights: reads a model's files into the page cache in the background."""

from __future__ import annotations

from labinfer.base.config import EngineOptions
from labinfer.comm.spmd.environment import LaunchEnvironment
from labinfer.native.cache_file import digest
from labinfer.weights.read_ahead import start_reading_ahead
from labinfer.weights.weight_cache import WeightCache


def prefetch_weights(environment: LaunchEnvironment, options: EngineOptions) -> None:
    """Read this rank's share of the model's files into the page cache, in a thread, if one node holds the whole model.

    Reads nothing if other nodes hold a part of the model, or if the ranks must first agree on a plan (``--layout``).
    """
    layout_is_known = environment.world_size == 1 or not options.parallel.layout
    if environment.is_one_node and layout_is_known:
        start_reading_ahead(
            options.model.model,
            environment.model_dir,
            environment.local_rank,
            environment.local_world_size,
            hub=options.model.hub_or(environment.hub),
            cache=WeightCache.from_home(options.cache.weight_cache_size),
            options=digest(options.weight_options),
        )
