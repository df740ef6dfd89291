"""Products with quantized weights."""

from __future__ import annotations

import torch

from stub_torch_npu.limits import HALF, is_transposed, require, require_dtype, require_plain

MAX_SIZE = 65535


def npu_dynamic_quant(x, *, smooth_scales=None, group_index=None, dst_type=None):
    page = "torch_npu-npu_dynamic_quant.md"
    require(smooth_scales is group_index is dst_type is None, page, "arguments that this stand-in lacks")
    require_dtype(x, HALF, page, "x")
    require(x.dim() > 1, page, "x has several dimensions")
    scale = x.float().abs().amax(-1) / 127
    return (x.float() / scale.unsqueeze(-1)).nan_to_num().round().to(torch.int8), scale


def npu_quant_matmul(
    x1, x2, scale, *, offset=None, pertoken_scale=None, bias=None, output_dtype=None, group_sizes=None
):
    page = "torch_npu-npu_quant_matmul.md"
    require(offset is group_sizes is None, page, "arguments that this stand-in lacks")
    require(x1.dtype == x2.dtype == torch.int8 and x1.dim() == x2.dim() == 2, page, "int8 matrices")
    for name, tensor in (("x1", x1), ("x2", x2), ("scale", scale)):
        require(tensor.numel(), page, f"{name} is empty")
    require(x1.is_contiguous(), page, "x1 is contiguous")
    require(x2.is_contiguous() or is_transposed(x2), page, "x2 is contiguous or transposed")
    require(max(x1.shape[-1], x2.shape[-1]) <= MAX_SIZE, page, "the last dimensions of x1 and x2 are at most 65535")
    require(x1.shape[1] == x2.shape[0], page, "x1 (m, k) and x2 (k, n)")
    require(scale.shape in [(1,), (x2.shape[1],)], page, "scale is (1,) or (n,)")
    require(pertoken_scale is not None and pertoken_scale.shape == x1.shape[:1], page, "pertoken_scale is (m,)")
    require_dtype(pertoken_scale, (torch.float32,), page, "pertoken_scale")
    require(output_dtype in HALF, page, "float32 scales of tokens go with a result in 16 bits")
    scales = (torch.float32,) if output_dtype == torch.float16 else (torch.float32, torch.bfloat16)
    require_dtype(scale, scales, page, "scale")
    out = (x1.float() @ x2.float()) * scale.float() * pertoken_scale.unsqueeze(1)
    if bias is not None:
        require(bias.shape == (x2.shape[1],), page, "bias is (n,)")
        require_dtype(bias, (torch.int32, torch.bfloat16, torch.float32), page, "bias")
        out = out + bias.float()
    return out.to(output_dtype)


def unpack_int4(words):
    """Codes in -8 … 7 of words of 8, the first one in the lowest bits: ``convert_to_int4_pack`` in
    op_plugin/ops/opapi/ConvertWeightToINT4PackKernelNpuOpApi.cpp of Ascend/op-plugin."""
    codes = words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
    return ((codes ^ 8) - 8).flatten(-2)


def npu_weight_quant_batchmatmul(
    x,
    weight,
    antiquant_scale,
    antiquant_offset=None,
    quant_scale=None,
    quant_offset=None,
    bias=None,
    antiquant_group_size=0,
    inner_precise=0,
):
    page = "torch_npu-npu_weight_quant_batchmatmul.md"
    require(quant_scale is quant_offset is None and inner_precise == 0, page, "arguments that this stand-in lacks")
    require_dtype(x, HALF, page, "x")
    require_plain(x, page, "x")
    require(x.dim() == weight.dim() == 2 and weight.numel(), page, "x (M, K) and weight (K, N)")
    require(weight.dtype == torch.int32 and is_transposed(weight), page, "transposed words of int4")
    codes = unpack_int4(weight.t()).t()
    (rows, inputs), outputs = x.shape, codes.shape[1]
    require(codes.shape[0] == inputs, page, "x and weight have one K")
    require(codes.shape != (1, 8) and weight.shape != (1, 1), page, "no transposed weight of shape (1, 8)")
    require(1 <= inputs <= MAX_SIZE and 1 <= outputs <= MAX_SIZE, page, "K and N are at most 65535")
    group = antiquant_group_size
    require(group == 0 or 32 <= group <= inputs - 1 and group % 32 == 0, page, f"group size {group} of {inputs} inputs")
    shape = (-(-inputs // group), outputs) if group else (1, outputs)
    require(antiquant_scale.shape == shape and antiquant_scale.dtype == x.dtype, page, f"scales {shape} in x's dtype")
    scale, offset = antiquant_scale.float(), 0.0
    if antiquant_offset is not None:
        require(antiquant_offset.shape == shape and antiquant_offset.dtype == x.dtype, page, f"offsets {shape}")
        offset = antiquant_offset.float()
    each = group or inputs
    groups = torch.arange(inputs) // each
    matrix = (codes.float() + (offset[groups] if group else offset)) * (scale[groups] if group else scale)
    out = x.float() @ matrix
    if bias is not None:
        require_plain(bias, page, "bias")
        require(bias.shape in [(outputs,), (1, outputs)], page, "bias is (N,)")
        wanted = torch.float32 if x.dtype == torch.bfloat16 else torch.float16
        require_dtype(bias, (wanted,), page, "bias")
        out = out + bias.float()
    assert out.shape[0] == rows
    return out.to(x.dtype)
