"""Compiled functions for loading weights: multi-threaded file reads, and decoding of quantized weights in cache-sized chunks."""

from __future__ import annotations

import torch

from labinfer.functions.cpu.library import Library
from labinfer.weights.loading import LoadFunctions


class CpuLoading(LoadFunctions):
    """C++ implementation of ``LoadFunctions``.

    Args:
        library: see ``library.load``.
    """

    def __init__(self, library: Library):
        self._library = library

    def read_rows(self, file: int, position: int, stride: int, rows_RB: torch.Tensor) -> bool:
        rows, size = rows_RB.shape
        threads = torch.get_num_threads()
        return bool(
            self._library.read_rows(file, position, stride, rows_RB.data_ptr(), rows_RB.stride(0), rows, size, threads)
        )

    def transpose_words(self, words_WO: torch.Tensor, out_OW: torch.Tensor) -> None:
        self._transpose(self._library.transpose_words, words_WO, out_OW)

    def transpose_awq(self, words_IC: torch.Tensor, out_OW: torch.Tensor) -> None:
        self._transpose(self._library.transpose_awq, words_IC, out_OW)

    @staticmethod
    def _transpose(call, words: torch.Tensor, out_OW: torch.Tensor) -> None:
        call(
            words.data_ptr(),
            words.stride(0),
            out_OW.data_ptr(),
            out_OW.stride(0),
            *words.shape,
            torch.get_num_threads(),
        )

    def decode(
        self,
        stored_OB: torch.Tensor,
        scales_OG: torch.Tensor,
        zeros_OG: torch.Tensor | None,
        out_OI: torch.Tensor,
        *,
        bits: int,
        group: int,
        lead: int,
        skip: int = 0,
        is_float: bool = False,
        order_I: torch.Tensor | None = None,
    ) -> None:
        self._library.decode(
            stored_OB.data_ptr(),
            stored_OB.stride(0),
            scales_OG.data_ptr(),
            None if zeros_OG is None else zeros_OG.data_ptr(),
            scales_OG.stride(0),
            None if order_I is None else order_I.data_ptr(),
            out_OI.data_ptr(),
            out_OI.stride(0),
            *out_OI.shape,
            group,
            lead,
            skip,
            bits,
            is_float,
            out_OI.dtype == torch.float32,
            torch.get_num_threads(),
        )

    def round_groups(
        self, values_OI: torch.Tensor, codes_OB: torch.Tensor, scales_OG: torch.Tensor, *, group: int, lead: int
    ) -> None:
        self._library.round_groups(
            values_OI.data_ptr(),
            values_OI.stride(0),
            codes_OB.data_ptr(),
            codes_OB.stride(0),
            scales_OG.data_ptr(),
            scales_OG.stride(0),
            *values_OI.shape,
            group,
            lead,
            torch.get_num_threads(),
        )

    def checksum(self, bytes_B: torch.Tensor) -> int:
        return self._library.checksum(bytes_B.data_ptr(), len(bytes_B)) % (1 << 64)
