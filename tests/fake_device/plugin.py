"""The entry point that ``import torch`` calls, as that of a vendor's package: it makes the cards known to torch."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

SWITCHES = ("no-float64", "late-copies", "no-memory-info", "one-card", "does-not-load")
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
NUM_CARDS = 2
CARD_BYTES = 256 << 20
GROUPS = {"npu": "hccl", "musa": "mccl", "mlu": "cncl"}
"""The vendors' process groups. Other names have none."""


def load() -> None:
    """Read the environment that ``install`` made, and register the cards under the name in it."""
    name = own_name(os.environ.get("FAKE_DEVICE", ""))
    if not name:
        return
    import torch
    import torch.distributed as dist

    from .cards import VISIBLE, Cards, visible_numbers
    from .counts import Counts
    from .group import CardGroup

    switches = set(filter(None, os.environ.get("FAKE_DEVICE_SWITCHES", "").split(",")))
    if unknown := switches - set(SWITCHES):
        raise ValueError(f"FAKE_DEVICE_SWITCHES: {sorted(unknown)} is none of {', '.join(SWITCHES)}")
    if "does-not-load" in switches:
        raise ImportError(f"lib{GROUPS.get(name, name)}.so: cannot open shared object file: No such file or directory")
    variable = VISIBLE.get(name, f"{name.upper()}_VISIBLE_DEVICES")
    local_rank = _first_of(LOCAL_RANKS)
    if "one-card" in switches and local_rank is not None:
        os.environ.setdefault(variable, str(int(local_rank) % NUM_CARDS))  # as srun --gpus-per-task=1 does
    numbers = visible_numbers(name, NUM_CARDS)

    library = ctypes.CDLL(os.environ["FAKE_DEVICE_LIBRARY"])
    library.fake_device_allocated.restype = library.fake_device_num_kernels.restype = ctypes.c_int64
    size = int(os.environ.get("FAKE_DEVICE_BYTES", CARD_BYTES))
    library.fake_device_start(
        len(numbers),
        ctypes.c_int64(size),
        "no-float64" not in switches,
        "late-copies" in switches,
        "no-memory-info" in switches,
    )
    torch.utils.rename_privateuse1_backend(name)
    folder = os.environ.get("FAKE_DEVICE_COUNTS")
    counts = Counts(library, Path(folder) if folder else None)
    host = os.environ.get("LABINFER_NODE_NAME", os.uname().nodename)
    cards = Cards(name, library, counts, numbers, host, size)
    torch._register_device_module(name, cards)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if name in GROUPS and dist.is_available():
        make = functools.partial(CardGroup, GROUPS[name], cards)
        dist.Backend.register_backend(GROUPS[name], make, devices=[name])


def own_name(names: str) -> str:
    """This process's name of ``FAKE_DEVICE``: the only one, or that of its rank; empty for none."""
    if "," not in names:
        return names
    rank = _first_of(RANKS)
    return "" if rank is None else names.split(",")[int(rank)]


def _first_of(variables: tuple[str, ...]) -> str | None:
    """What a launcher says, whichever it is."""
    return next((os.environ[key] for key in variables if key in os.environ), None)
