"""open_energy_meter: the energy meter of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from labinfer.base.errors import first_line
from labinfer.comm.spmd.devices import torch_device
from labinfer.comm.spmd.machine import RankInfo
from labinfer.launch.layout.layout import Layout
from labinfer.launch.providers import describe_device
from labinfer.observe.energy_meter import POWERCAP, EnergyCounter, EnergyMeter, find_packages


def open_energy_meter(
    layout: Layout, rank: int, everyone: Sequence[RankInfo], powercap: Path = POWERCAP
) -> EnergyMeter:
    """Open the meter of a placed rank: the CPU packages of its host if it is the host's first placed rank, and its accelerator if it is
    the first rank on it. So the sum over ranks counts nothing twice.

    Args:
        everyone: all started ranks.
        powercap: folder of the packages' counters.
    """
    counters: list[EnergyCounter] = []
    missing: list[str] = []
    placed, device = sorted(layout.devices), layout.devices[rank]
    if rank == next(other for other in placed if everyone[other].node == everyone[rank].node):
        counters, missing = find_packages(powercap)
    if device.type != "cpu":
        memory = layout.memory(rank, everyone)
        if rank == next(other for other in placed if layout.memory(other, everyone) == memory):
            try:
                read = describe_device(device.type).open_energy_counter(torch_device(device))
                counters.append(EnergyCounter(name=str(device), read=read))
            except Exception as error:  # noqa: BLE001 - a vendor's library or a plugin may raise anything
                missing.append(f"{device}: {first_line(error)}")
    return EnergyMeter(counters, missing)
