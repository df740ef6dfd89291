"""``--reproducible any-cpu``: torch and the compiled functions have the same bits on every x86 processor with AVX2."""

from __future__ import annotations

import platform

import torch

from labinfer.base.errors import UserError
from labinfer.comm.spmd.environment import PORTABLE_TORCH
from labinfer.native.targets import PORTABLE, processor_features
from labinfer.native.torch_instructions import MKL_COMPATIBLE, mkl_branch

TORCH_CAPABILITY = "AVX2"
"""Instructions that torch's operations use with ``PORTABLE_TORCH``, by torch's name."""


def check_portable() -> None:
    """Check that this process computes with the instructions of ``PORTABLE`` only.

    Raises:
        UserError: the processor lacks some of them, or torch has used others before it read ``PORTABLE_TORCH``.
    """
    if not PORTABLE.runs_here():
        lacks = ", ".join(sorted(PORTABLE.features - processor_features()))
        raise UserError(
            f"--reproducible any-cpu needs an x86 processor with AVX2; this one ({platform.machine()}) lacks {lacks}; give "
            "--reproducible alone, for the bits of this kind of processor"
        )
    used = torch.backends.cpu.get_cpu_capability()
    if used != TORCH_CAPABILITY or mkl_branch() not in (MKL_COMPATIBLE, None):
        library = f"torch has computed with {used}" if used != TORCH_CAPABILITY else "MKL has computed with other"
        variables = " ".join(f"{name}={value}" for name, value in PORTABLE_TORCH.items())
        raise UserError(
            f"--reproducible any-cpu: {library} instructions in this process before; start it with {variables}"
        )
