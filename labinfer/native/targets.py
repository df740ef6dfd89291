"""Processor targets of prebuilt libraries: compiler flags, and the features required at run time."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
X86_64_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
X86_64_V4 = X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ARMV8_2 = frozenset({"asimd", "crc32", "atomics", "asimdrdm", "asimddp"})


@dataclass(frozen=True)
class Target:
    """Kind of processor.

    Attributes:
        machine: value of ``platform.machine()``.
        flags: compiler flags.
        features: required instruction sets, by their names in ``/proc/cpuinfo``.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]

    def runs_here(self) -> bool:
        """Whether this machine's processor has all required features."""
        return self.machine == platform.machine() and self.features <= processor_features()


TARGETS = (
    Target(
        "x86-64-v4-amx",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        X86_64_V4 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
    ),
    Target(
        "x86-64-v4-bf16",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        X86_64_V4 | {"avx512_vnni", "avx512_bf16"},
    ),
    Target("x86-64-v4-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), X86_64_V4 | {"avx512_vnni"}),
    Target("x86-64-v4", "x86_64", ("-march=x86-64-v4",), X86_64_V4),
    Target("x86-64-v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), X86_64_V3 | {"avx_vnni"}),
    Target("x86-64-v3", "x86_64", ("-march=x86-64-v3",), X86_64_V3),
    Target("armv8.6", "aarch64", ("-march=armv8.2-a+dotprod+i8mm+bf16",), ARMV8_2 | {"i8mm", "bf16"}),
    Target("armv8.2", "aarch64", ("-march=armv8.2-a+dotprod",), ARMV8_2),
)
"""All targets; those of one machine type from best to worst."""
PORTABLE = next(target for target in TARGETS if target.name == "x86-64-v3")
"""Target whose library all x86 processors run with ``--reproducible any-cpu``."""


def processor_features() -> frozenset[str]:
    """Features of this machine's first core; empty if unknown."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "").split()
    )
