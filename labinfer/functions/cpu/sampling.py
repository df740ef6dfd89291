"""Compiled greedy and random sampling, for logits of any float dtype."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch

from labinfer.functions.cpu.library import Library, readable
from labinfer.functions.draw import Draw
from labinfer.functions.reference import sampling


class CompiledDraw(ctypes.Structure):
    """C++ struct of sampling.cpp for the parameters of a ``Draw``, declared for ctypes."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("row", "position", "seed", "top_k")),
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "log_min_p")),
    ]

    @classmethod
    def convert(cls, draw: Draw) -> CompiledDraw:
        params = draw.params
        log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        return cls(draw.row, draw.position, params.seed, params.top_k, params.temperature, params.top_p, log_min_p)


class CpuSampling:
    """Each method implements the function of equal name; ``protocols`` documents the arguments.

    Args:
        library: see ``library.load``.
    """

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, library: Library):
        self._argmax = {torch.float32: library.argmax_float32, torch.bfloat16: library.argmax_bfloat16}
        self._sample = {torch.float32: library.sample_float32, torch.bfloat16: library.sample_bfloat16}

    def calls(self) -> dict[str, Callable]:
        """Function name → method of this object that implements the function."""
        return {"argmax": self.argmax, "sample": self.sample}

    def argmax(self, logits_BV: torch.Tensor) -> torch.Tensor:
        logits_BV = readable(logits_BV.contiguous())
        ids_B = torch.empty(logits_BV.shape[0], dtype=torch.int64)
        self._argmax[logits_BV.dtype](logits_BV.data_ptr(), ids_B.data_ptr(), *logits_BV.shape, torch.get_num_threads())
        return ids_B

    def sample_on_host(self, logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """``sample`` for the logits of an accelerator, by one copy of the drawn rows."""
        return self.sample(*sampling.drawn_rows_on_host(logits_BV, draws))

    def sample(self, logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        logits_BV = readable(logits_BV.contiguous())
        ids = (ctypes.c_int64 * len(draws))()
        compiled = (CompiledDraw * len(draws))(*map(CompiledDraw.convert, draws))
        self._sample[logits_BV.dtype](
            logits_BV.data_ptr(), compiled, ids, len(draws), logits_BV.shape[1], torch.get_num_threads()
        )
        tokens = list(ids)
        for index, draw in enumerate(draws):
            if draw.params.typical_p < 1.0:  # typical-p does not order tokens by logit
                tokens[index] = sampling.sample(logits_BV, [draw])[0]
        return tokens
