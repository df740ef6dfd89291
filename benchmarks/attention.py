"""Rates of attention over the KV cache beside the machine's limits, with one query token and with a prompt.

    python benchmarks/attention.py --threads 2

Decode: bytes of keys, values and scales that one sequence's token sees, by the time of the call, beside the rate at which the same
threads read memory. As many caches as no processor's cache holds take turns, in calls that are replayed one after another, as those of
a small step's layers are. Blocks stand in the order of their tokens, or anywhere.
Prompt: operations of both products beside the rate of the processor's dense products. Figures are medians over rounds in which all
take turns, with the roofline limits before and after them; sizes are by default those of a layer of Qwen2.5-0.5B.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from experts import CACHE, compiled_function, seconds

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.roofline_limits import RooflineLimits
from labinfer.native.memory import use_huge_pages
from labinfer.observe.table import format_table

CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Calls that read so many tokens of context for so many new ones."""

    dtype: str
    context: int
    num_new: int
    is_shuffled: bool
    calls: tuple[Callable[[], torch.Tensor], ...]
    run: Callable[[], object]
    """Makes all of them, which have to stay: it reads their batches."""
    num_bytes: int
    """Bytes of the cache that a call needs."""
    operations: int


def make_case(
    function: Callable,
    provider: CpuProvider,
    args: argparse.Namespace,
    dtype: str,
    context: int,
    *,
    num_new: int,
    is_shuffled: bool,
) -> Case:
    shape = (args.kv_heads, args.size)
    num_blocks = -(-context // args.block_size)
    bytes_per_token = 2 * args.kv_heads * (args.size * DTYPES[dtype].itemsize + (4 if dtype == "int8" else 0))
    layers = 1 if num_new > 1 else -(-CACHE // (context * bytes_per_token))
    tiled = not args.rows
    # Large pages have to be asked for before memory is written, which zeros are.
    form = LayerCache.zeros(layers * num_blocks, args.block_size, shape, DTYPES[dtype], device="meta", tiled=tiled)
    tensors = [torch.empty_like(tensor, device="cpu") for tensor in form.tensors()]
    for tensor in tensors:
        if not args.small_pages:
            use_huge_pages(tensor.data_ptr(), tensor.nbytes)
        tensor.fill_(1)
    cache = LayerCache(*tensors)
    order = torch.randperm(layers * num_blocks) if is_shuffled else torch.arange(layers * num_blocks)
    q_THP = torch.randn(num_new, args.heads, args.size).bfloat16()
    head_ptr = torch.arange(args.kv_heads + 1) * (args.heads // args.kv_heads)
    heads = AttentionHeads(head_ptr, args.size**-0.5)

    def bind(table: torch.Tensor) -> Callable[[], torch.Tensor]:
        batch = AttentionBatch.build([0, num_new], [context], [table.tolist()], CPU)
        return lambda: function(q_THP, cache, batch, heads)

    calls = tuple(bind(table) for table in order.split(num_blocks))
    return Case(
        dtype=dtype,
        context=context,
        num_new=num_new,
        is_shuffled=is_shuffled,
        calls=calls,
        run=replayed(provider, calls) if num_new == 1 else calls[0],
        num_bytes=context * bytes_per_token,
        operations=4 * args.heads * args.size * sum(range(context - num_new + 1, context + 1)),
    )


def replayed(provider: CpuProvider, calls: Sequence[Callable[[], torch.Tensor]]) -> Callable[[], object]:
    """A function that makes these calls as a captured step does."""
    _, graph = provider.capture()(lambda: [call() for call in calls][-1])
    if graph is None:
        raise SystemExit("calls of this implementation cannot be captured; choose another --implementation")
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1000, 4000, 16000])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--implementation", default="", help="such as cpu-dot; by default the preferred one")
    parser.add_argument("--rows", action="store_true", help="a cache in rows instead of tiles")
    parser.add_argument("--small-pages", action="store_true", help="without the large pages that a KV cache asks for")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    function, provider = compiled_function("paged_attention", args.threads, args.implementation)
    cases = [
        make_case(function, provider, args, dtype, context, num_new=1, is_shuffled=is_shuffled)
        for dtype in args.dtypes
        for context in args.contexts
        for is_shuffled in (False, True)
    ]
    cases += [
        make_case(function, provider, args, dtype, prompt, num_new=prompt, is_shuffled=False)
        for dtype in args.dtypes
        for prompt in args.prompts
    ]
    before = provider.roofline_limits()
    times: list[list[float]] = [[] for _ in cases]
    for number in range(args.rounds + 1):
        for case, measured in zip(cases, times, strict=True):
            taken = seconds(case.run) / len(case.calls)
            if number > 0:  # the first round warms up
                measured.append(taken)
    print_figures(cases, [statistics.median(measured) for measured in times], (before, provider.roofline_limits()))


def print_figures(cases: list[Case], times: list[float], limits: tuple[RooflineLimits, RooflineLimits]) -> None:
    """A row for each case, with its share of the mean of the two limits."""
    memory = statistics.mean(limit.memory for limit in limits)
    dense = statistics.mean(max(limit.dot, limit.float32) for limit in limits)
    reads = ", ".join(f"{limit.memory / 1e9:.1f}" for limit in limits)
    print(f"memory {reads} GB/s, dense products {dense / 1e9:.0f} GFLOP/s")
    rows = []
    for case, time in zip(cases, times, strict=True):
        rate, share = case.num_bytes / time, case.num_bytes / time / memory
        name, unit = ("shuffled" if case.is_shuffled else "in order"), "GB/s"
        if case.num_new > 1:
            rate, share = case.operations / time, case.operations / time / dense
            name, unit = "prompt", "GFLOP/s"
        rows.append((case.dtype, case.context, name, f"{time * 1e6:.0f}", f"{rate / 1e9:.1f} {unit}", f"{share:.0%}"))
    print(format_table(("cache", "context", "blocks", "us", "rate", "of the limit"), rows))


if __name__ == "__main__":
    main()
