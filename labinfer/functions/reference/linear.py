"""Matrix products and embedding with plain (unquantized) weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from labinfer.functions.packed_weight import DenseWeight


def linear(x_TI: torch.Tensor, weight: DenseWeight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``: (T, I) → (T, O)."""
    return F.linear(x_TI, weight.data, bias_O)


def pack_weight(weight_OI: torch.Tensor) -> DenseWeight:
    """Wrap a loaded matrix without a copy; the caller must not change it afterwards."""
    return DenseWeight(weight_OI, *weight_OI.shape)


def embedding(ids_T: torch.Tensor, table: DenseWeight, first: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of a vocabulary slice that begins at id ``first``: (T,) → (T, D); ids outside the slice give zeros."""
    out = table.data.new_empty(len(ids_T), table.data.shape[1]) if out is None else out
    if has_torch_function((ids_T,)):  # a capture records this as one torch operation
        return handle_torch_function(embedding, (ids_T,), ids_T, table, first, out)
    local_T = ids_T - first
    outside_T = (local_T < 0) | (local_T >= len(table.data))
    torch.index_select(table.data, 0, local_T.clamp(0, len(table.data) - 1), out=out)
    return out.masked_fill_(outside_T.unsqueeze(1), 0)


embedding.repeats_in_place = True
