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
    """Wrap a loaded matrix without a copy; the caller gives it up."""
    return DenseWeight(weight_OI, *weight_OI.shape)


def embedding(token_ids_T: torch.Tensor, table: DenseWeight, first: int) -> torch.Tensor:
    """Rows of a vocabulary slice that begins at id ``first``: (T,) → (T, D); ids outside the slice give zeros."""
    return _look_up(table.data.new_empty(len(token_ids_T), table.data.shape[1]), token_ids_T, table.data, first)


def _look_up(rows_TD: torch.Tensor, token_ids_T: torch.Tensor, table_VD: torch.Tensor, first: int) -> torch.Tensor:
    """Write the result of ``embedding`` to ``rows_TD``."""
    if has_torch_function((token_ids_T,)):  # a capture records this as one torch operation
        return handle_torch_function(_look_up, (token_ids_T,), rows_TD, token_ids_T, table_VD, first)
    local_T = token_ids_T - first
    outside_T = (local_T < 0) | (local_T >= len(table_VD))
    torch.index_select(table_VD, 0, local_T.clamp(0, len(table_VD) - 1), out=rows_TD)
    return rows_TD.masked_fill_(outside_T.unsqueeze(1), 0)


_look_up.repeats_in_place = True
