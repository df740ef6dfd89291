"""Engine options whose defaults depend on the devices of the launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from labinfer.base.config import EngineOptions
from labinfer.comm.spmd.machine import RankInfo
from labinfer.launch.providers import describe_device


def with_device_defaults(options: EngineOptions, everyone: Sequence[RankInfo]) -> EngineOptions:
    """``options`` with the largest block size that a device of the launch prefers, unless ``--block-size`` is given. Equal on every rank.

    Args:
        everyone: all started ranks, whose accelerators ``--device auto`` takes.
    """
    if options.cache.block_size:
        return options
    types = {name.partition(":")[0] for name in options.parallel.device}
    if "auto" in types:
        types = types - {"auto"} | {info.accelerator or "cpu" for info in everyone}
    size = max(describe_device(device_type).block_size for device_type in types)
    return dataclasses.replace(options, cache=dataclasses.replace(options.cache, block_size=size))
