"""Latent attention of one new token beside the machine's limits: absorbed, with the heads of DeepSeek-V2-Lite and of DeepSeek-V3.

    python benchmarks/latent_decode.py --threads 2

A call is compared with the time of reading what it needs: the latents of the context, once for all heads, and the weights that make
keys and values of them; and with the time of its operations at the rate of dense products, which is the longer one where a latent meets
many heads. Calls and reads take turns in short slices, over as many caches and weights as no processor's cache holds, and of each the least
time counts: what else runs on the machine only adds to times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from experts import CACHE, compiled_function

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.calls import CallSetting
from labinfer.functions.cpu.library import build, load
from labinfer.functions.latent_calls import LatentSizes
from labinfer.observe.table import format_table

CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}
HEADS = {"V2-Lite": 16, "V3 on 8 ranks": 16, "V3 on 2 ranks": 64, "V3": 128}
SIZES = {"rank": 512, "rotated": 64, "unrotated": 128, "value_size": 128}
"""Both models have these."""


@dataclass(frozen=True)
class Case:
    """A layer's heads on a rank, and what a call costs at least."""

    name: str
    dtype: str
    calls: tuple[Callable[[], object], ...]
    """Over caches and weights of their own."""
    num_bytes: int
    operations: int


def make_case(function: Callable, name: str, dtype: str, context: int, block_size: int) -> Case:
    sizes = LatentSizes(heads=HEADS[name], **SIZES)
    setting = CallSetting(device=CPU, dtype=torch.bfloat16, kv_dtype=DTYPES[dtype], block_size=block_size)
    num_blocks, unit = -(-context // block_size), sizes.unrotated + sizes.value_size
    blocks = sizes.cache(num_blocks, setting)
    weight_bytes = sizes.heads * unit * sizes.rank * torch.bfloat16.itemsize
    num_bytes = sum(tensor.nbytes for tensor in blocks.tensors()) * context // (num_blocks * block_size) + weight_bytes
    copies = -(-CACHE // num_bytes)
    cache = sizes.cache(copies * num_blocks, setting)
    cache.latent.random_(-3, 4) if dtype == "int8" else cache.latent.normal_()
    if cache.latent_scale is not None:
        cache.latent_scale.fill_(0.3)
    q_THQ = torch.randn(1, sizes.heads, sizes.query_size).bfloat16()

    def bind(table: torch.Tensor) -> Callable[[], object]:
        weight_HUL = (torch.randn(sizes.heads, unit, sizes.rank) / sizes.rank**0.5).bfloat16()
        batch = AttentionBatch.build([0, 1], [context], [table.tolist()], CPU)
        return lambda: function(q_THQ, cache, batch, weight_HUL, sizes.query_size**-0.5)

    pairs = context * (2 * sizes.rank + sizes.rotated)
    return Case(
        name=f"{name}, {sizes.heads} heads",
        dtype=dtype,
        calls=tuple(bind(table) for table in torch.randperm(copies * num_blocks).split(num_blocks)),
        num_bytes=num_bytes,
        operations=2 * sizes.heads * (pairs + unit * sizes.rank),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["V2-Lite", "V3"], choices=HEADS)
    parser.add_argument("--context", type=int, default=4096, help="tokens")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="of the cache")
    parser.add_argument("--implementation", default="", help="such as cpu-dot; by default the preferred one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each case")
    args = parser.parse_args()

    torch.manual_seed(0)
    function, provider = compiled_function("latent_attention", args.threads, args.implementation)
    limits, rows = provider.roofline_limits(), []
    rate = max(limits.float32, limits.dot)
    for dtype in args.dtypes:
        for name in args.cases:
            case = make_case(function, name, dtype, args.context, args.block_size)
            call, read = least_seconds(case, args)
            compute = case.operations / rate
            rows.append(
                (
                    *(case.name, dtype, f"{case.num_bytes / 1e6:.1f} MB"),
                    *(f"{seconds * 1e3:.2f}" for seconds in (call, read, compute)),
                    *(f"{call / read:.2f}", f"{call / max(read, compute):.2f}"),
                )
            )
    print(f"memory {limits.memory / 1e9:.1f} GB/s, dense products {rate / 1e9:.0f} GFLOP/s, {args.threads} threads")
    header = ("heads", "cache", "bytes", "call ms", "read ms", "products ms", "call / read", "call / longer")
    print(format_table(header, rows))


def least_seconds(case: Case, args: argparse.Namespace) -> tuple[float, float]:
    """Minimum seconds of a call, and of reading the bytes that it needs."""
    library, data = load(build()), torch.ones(CACHE, dtype=torch.uint8)
    slices = max(1, CACHE // case.num_bytes)
    calls, reads, begin, number = [], [], time.perf_counter(), 0
    while time.perf_counter() - begin < args.seconds or number < len(case.calls):
        call, part = case.calls[number % len(case.calls)], number % slices
        start = time.perf_counter()
        call()
        middle = time.perf_counter()
        library.roofline_memory(data.data_ptr() + part * case.num_bytes, case.num_bytes, args.threads)
        calls.append(middle - start)
        reads.append(time.perf_counter() - middle)
        number += 1
    return min(calls), min(reads)


if __name__ == "__main__":
    main()
