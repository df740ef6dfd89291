"""Routing and grouped products of a mixture's experts."""

from __future__ import annotations

import torch

from stub_torch_npu.limits import FLOATS, HALF, is_transposed, require, require_dtype, require_plain
from stub_torch_npu.products import unpack_int4


def npu_moe_gating_top_k(
    x,
    k,
    *,
    bias=None,
    k_group=1,
    group_count=1,
    group_select_mode=0,
    renorm=0,
    norm_type=0,
    out_flag=False,
    routed_scaling_factor=1.0,
    eps=1e-20,
):
    page = "torch_npu-npu_moe_gating_top_k.md"
    require_dtype(x, FLOATS, page, "x")
    require(x.dim() == 2 and x.numel(), page, "x has 2 dimensions")
    num_experts = x.shape[1]
    require(num_experts <= 2048, page, f"{num_experts} experts")
    require(num_experts % group_count == 0 and num_experts // group_count > 2, page, "more than 2 experts in a group")
    padded = -(-(num_experts // group_count) // 32) * 32
    require(padded * group_count <= 2048, page, "groups padded to 32 experts have at most 2048 experts")
    require(1 <= k_group <= group_count, page, f"{k_group} of {group_count} groups")
    require(1 <= k <= num_experts // group_count * k_group, page, f"{k} experts of {k_group} groups")
    require(group_select_mode in (0, 1) and renorm == 0 and norm_type in (0, 1), page, "known modes")
    scores = x.float().sigmoid() if norm_type else x.float().softmax(1)
    ranked = scores
    if bias is not None:
        require(bias.shape == (num_experts,) and bias.dtype == x.dtype, page, "bias is (E,) in x's dtype")
        ranked = scores + bias.float()
    if group_count > 1:
        grouped = ranked.view(len(x), group_count, -1)
        totals = grouped.topk(2, dim=2).values.sum(2) if group_select_mode else grouped.amax(2)
        hidden = torch.ones(len(x), group_count, dtype=torch.bool)
        hidden.scatter_(1, totals.argsort(dim=1, descending=True, stable=True)[:, :k_group], False)
        ranked = grouped.masked_fill(hidden.unsqueeze(2), float("-inf")).flatten(1)
    ids = ranked.argsort(dim=1, descending=True, stable=True)[:, :k]
    weights = scores.gather(1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), ids.int(), scores if out_flag else None


def npu_moe_init_routing_v2(
    x,
    expert_idx,
    *,
    scale=None,
    offset=None,
    active_num=-1,
    expert_capacity=-1,
    expert_num=-1,
    drop_pad_mode=0,
    expert_tokens_num_type=0,
    expert_tokens_num_flag=False,
    quant_mode=-1,
    active_expert_range=(),
    row_idx_type=0,
):
    page = "torch_npu-npu_moe_init_routing_v2.md"
    unused = (scale, offset, active_num, expert_capacity, drop_pad_mode, quant_mode, row_idx_type)
    require(unused == (None, None, -1, -1, 0, -1, 0), page, "arguments that this stand-in lacks")
    require(expert_tokens_num_type == 1 and expert_tokens_num_flag, page, "counts of each expert")
    require_dtype(x, FLOATS, page, "x")
    require_plain(x, page, "x")
    require_plain(expert_idx, page, "expert_idx")
    require_dtype(expert_idx, (torch.int32,), page, "expert_idx")
    require(x.dim() == expert_idx.dim() == 2 and len(x) == len(expert_idx), page, "x (T, H) and expert_idx (T, K)")
    require(0 <= expert_num <= 10240, page, f"{expert_num} experts")
    require(expert_idx.min() >= 0 and expert_idx.max() < expert_num, page, "expert_idx below expert_num")
    begin, end = active_expert_range
    require(0 <= begin < end <= expert_num, page, "active experts")
    ids = expert_idx.flatten().long()
    order = torch.where((begin <= ids) & (ids < end), ids, expert_num).argsort(stable=True)
    num_active = int(((begin <= ids) & (ids < end)).sum())
    rows = torch.full((len(ids), x.shape[1]), float("nan"), dtype=x.dtype)
    rows[:num_active] = x[order[:num_active] // expert_idx.shape[1]]
    places = torch.full((len(ids),), -1, dtype=torch.int32)
    places[order[:num_active]] = torch.arange(num_active, dtype=torch.int32)
    return rows, places, torch.bincount(ids, minlength=expert_num)[begin:end], torch.empty(0)


def npu_grouped_matmul(
    x,
    weight,
    *,
    bias=None,
    antiquant_scale=None,
    antiquant_offset=None,
    group_list=None,
    split_item=0,
    group_type=None,
    group_list_type=0,
    act_type=0,
    output_dtype=None,
):
    page = "torch_npu-npu_grouped_matmul.md"
    require(bias is output_dtype is None and act_type == 0, page, "arguments that this stand-in lacks")
    require(len(x) == len(weight) == 1 and split_item in (2, 3) and group_type == 0, page, "one tensor each, by rows")
    rows, matrices = x[0], weight[0]
    require(rows.dim() == 2 and matrices.dim() == 3, page, "x has 2 dimensions, weight 3")
    require_plain(rows, page, "x")
    require(matrices.numel() and (matrices.is_contiguous() or is_transposed(matrices)), page, "weight is transposed")
    require(group_list.dtype == torch.int64 and group_list.dim() == 1, page, "group_list is a list of int64")
    require(group_list_type == 1 and 1 < len(group_list) <= 1024, page, "2 to 1024 sizes of groups")
    require(len(group_list) == len(matrices), page, "as many groups as matrices")
    require(int(group_list.sum()) == len(rows), page, "the groups' sizes sum to the rows of x")
    inner = matrices.shape[1] if is_transposed(matrices) else matrices.shape[2]
    require(max(rows.shape[1], inner) < 65536, page, "last dimensions are below 65536")
    if antiquant_scale is None:
        require_dtype(rows, FLOATS, page, "x")
        require(matrices.dtype == rows.dtype, page, "x and weight have one dtype")
        wide = matrices.float()
    else:
        wide = _dequantize(matrices, antiquant_scale[0], antiquant_offset[0], rows.dtype, page)
    require(wide.shape[1] == rows.shape[1], page, "x (m, k) and weight (g, k, n)")
    parts = rows.split(group_list.tolist())
    return [torch.cat([part.float() @ matrix for part, matrix in zip(parts, wide, strict=True)]).to(rows.dtype)]


def _dequantize(matrices, scale, offset, dtype, page):
    require(dtype in HALF, page, "x is in 16 bits")
    require(
        scale.dtype == offset.dtype == dtype and scale.shape == offset.shape, page, "scales and offsets in x's dtype"
    )
    require(scale.is_contiguous() and offset.is_contiguous(), page, "scales and offsets are contiguous")
    if matrices.dtype == torch.int32:
        require(is_transposed(matrices), page, "words of int4 along the inputs")
        codes = unpack_int4(matrices.transpose(1, 2)).transpose(1, 2)
    else:
        require(matrices.dtype == torch.int8 and scale.dim() == 2, page, "int8 has a scale per output")
        codes = matrices
    count, inputs, outputs = codes.shape
    if scale.dim() == 2:
        scale, offset = scale.unsqueeze(1), offset.unsqueeze(1)
    groups = scale.shape[1]
    require(scale.shape == (count, groups, outputs), page, "scales (g, n) or (g, G, n)")
    require(inputs % groups == 0 and (inputs // groups) % 2 == 0, page, "groups divide the inputs evenly")
    index = torch.arange(inputs) // (inputs // groups)
    return (codes.float() + offset.float()[:, index]) * scale.float()[:, index]
