"""Instruction sets with which torch, and MKL inside of torch, compute: they decide the bits of log, exp, cos and sin."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

MKL_COMPATIBLE = 3
"""Branch of MKL's code for all processors, as MKL's header file numbers it."""
_BRANCH = 1
"""Option number that asks MKL's query function for the branch of its code."""


@cache
def _torch_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
    except OSError:
        return None


def mkl_branch() -> int | None:
    """Number of the branch of MKL's code; None if torch was built without MKL. The first call, or MKL's first
    computation, decides the branch for the process."""
    get = getattr(_torch_library(), "mkl_serv_cbwr_get", None)
    return None if get is None else get(_BRANCH)


def torch_instructions() -> str:
    """Name of the instructions that this process computes with in torch and in MKL, for fingerprints."""
    branch = mkl_branch()
    return f"torch with {torch.backends.cpu.get_cpu_capability()}, " + ("no MKL" if branch is None else f"MKL {branch}")
