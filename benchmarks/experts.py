"""A layer's experts in one call: what a decode takes of the memory's rate, and a prompt beside dense products.

    python benchmarks/experts.py --threads 2

Decode: one token, whose experts' bytes, read once, are compared with what the memory gives. Prompt: 2,048 tokens, beside a
dense MLP with as many operations for each token. Figures are medians over rounds in which both take turns; sizes are by
default those of the ``qwen3-moe`` shape of ``tools/random_checkpoint.py``. The whole of a decode: ``workloads.py``; cut over
ranks: ``layouts.py``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch

from labinfer.functions.calls import CallSetting, LinearCall
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.expert_calls import ExpertsCall
from labinfer.functions.registry import FunctionRegistry
from labinfer.launch.providers import make_registry
from labinfer.observe.table import format_table

SETTING = CallSetting(device=torch.device("cpu"), dtype=torch.bfloat16, kv_dtype=torch.bfloat16, block_size=16)
CACHE = 128 * 2**20
"""Bytes of experts that are gone through before one comes again: more than the caches hold."""
DECODES = 20
"""Decodes that are timed as one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=384, help="of each expert")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantizations", nargs="+", default=["none", "int8", "int4"])
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    provider = CpuProvider()
    provider.prepare(SETTING.device)
    registry, limits = make_registry([provider]), provider.roofline_limits()
    print(f"memory: {limits.memory / 1e9:.1f} GB/s with {args.threads} threads")
    rows = []
    with torch.inference_mode():
        for quantization in args.quantizations:
            call = ExpertsCall(
                quantization=quantization,
                num_experts=args.experts,
                all_experts=args.experts,
                num_chosen=args.chosen,
                hidden_size=args.hidden_size,
                columns=args.columns,
            )
            for name in registry.candidates("experts", SETTING.device, SETTING.dtype, quantization=quantization):
                gigabytes, ratio = measure(registry, call, name, args.prompt, args.rounds)
                share = 100 * gigabytes * 1e9 / limits.memory
                rows.append((quantization, name, f"{gigabytes:.1f}", f"{share:.0f}", f"{ratio:.2f}"))
    header = ("weights", "implementation", "decode GB/s", "% memory", f"{args.prompt} tokens, of dense rate")
    print(format_table(header, rows))


def measure(registry: FunctionRegistry, call: ExpertsCall, name: str, prompt: int, rounds: int) -> tuple[float, float]:
    """GB/s of a decode's experts, and a prompt's rate of operations as a part of that of dense products."""

    def function(function: str) -> Callable:
        known = registry.candidates(function, SETTING.device, SETTING.dtype, quantization=call.quantization)
        return known[name if name in known else "cpu"].call

    layers = [call.pack(function("make_experts"), SETTING)]
    while sum(layer.nbytes for layer in layers) < CACHE:
        layers.append(layers[0].clone())
    turns = itertools.cycle(layers)
    decode, read = call.bind(function("experts"), 1, SETTING), call.bind(function("experts"), prompt, SETTING)

    width = call.num_chosen * call.columns
    shapes = ((2 * width, call.hidden_size), (call.hidden_size, width))
    dense = []
    for outputs, inputs in shapes:
        product = LinearCall(target="linear", quantization=call.quantization, outputs=outputs, inputs=inputs)
        weight = product.pack(function("pack_weight"), SETTING)
        dense.append((product.bind(function("linear"), prompt, SETTING), weight))

    def decodes() -> None:
        for _ in range(DECODES):
            decode(next(turns))

    def dense_products() -> None:
        for multiply, weight in dense:
            multiply(weight)

    decodes(), read(layers[0]), dense_products()  # warm up
    rates, ratios = [], []
    for _ in range(rounds):
        rates.append(DECODES * call.read_bytes(layers[0].nbytes, 1) / seconds(decodes) / 1e9)
        ratios.append(seconds(dense_products) / seconds(lambda: read(layers[0])))
    return statistics.median(rates), statistics.median(ratios)


def compiled_function(name: str, threads: int, implementation: str = "") -> tuple[Callable, CpuProvider]:
    """An implementation of a function in bfloat16, by default the preferred one, and the provider that has compiled it; torch computes on
    so many threads from now on."""
    torch.set_num_threads(threads)
    provider = CpuProvider()
    provider.prepare(SETTING.device)
    known = make_registry([provider]).candidates(name, SETTING.device, SETTING.dtype)
    chosen = implementation or list(known)[-1]
    if chosen not in known:
        raise SystemExit(f"--implementation {chosen}: there is none of this name; choose one of {', '.join(known)}")
    return known[chosen].call, provider


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
