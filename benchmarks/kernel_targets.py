"""Products of one matrix with 1, 8 and 64 rows, by the kinds of processors that the functions are compiled for.

    python benchmarks/kernel_targets.py [--targets own,x86-64-v3] [--threads 2]

The matrix is that of gate and up of a model of 0.5B (9,728 x 896), as often as fits into 200 MB for few rows, so that it comes from
memory. Kinds take turns; figures are medians of the rounds. "own" is what is compiled on a machine for its very processor. Forms "by 32" are
those of GGUF files, with a scale for each 32 inputs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from labinfer.functions.cpu import library  # noqa: E402
from labinfer.functions.cpu.floats import CpuFunctions  # noqa: E402
from labinfer.functions.cpu.measure_roofline import measure_roofline  # noqa: E402
from labinfer.functions.cpu.quantized import CpuQuantized  # noqa: E402
from labinfer.functions.packed_weight import QuantizedWeight  # noqa: E402
from labinfer.native.targets import TARGETS  # noqa: E402
from labinfer.weights.codes import Codes, QuantLayout  # noqa: E402

OUTPUTS, INPUTS, GROUP = 9728, 896, 32
ROWS = (1, 8, 64)
BYTES = 200e6
ROUND_SECONDS = 0.05


def products(compiled: library.Library) -> dict[str, tuple[Callable, Callable]]:
    """For each form of weights, what packs a matrix and what multiplies with it."""
    tiles = "amx" if "amx" in compiled.kernels else ""
    quantized, dense = CpuQuantized(compiled, tiles), CpuFunctions(compiled, tiles or compiled.kernels[-1])
    return {
        "bfloat16": (dense.pack_weight, dense.linear),
        "int8": (quantized.quantize_int8, quantized.linear),
        "int8 by 32": (lambda _: random_codes(quantized, 8), quantized.linear),
        "int5 by 32": (lambda _: random_codes(quantized, 5), quantized.linear),
        "int4 by 32": (lambda weight: quantized.quantize_int4(weight, GROUP), quantized.linear),
    }


def random_codes(quantized: CpuQuantized, bits: int) -> QuantizedWeight:
    """A matrix of codes, as files have them."""
    words_OW = torch.randint(-(2**31), 2**31, (OUTPUTS, INPUTS * bits // 32), dtype=torch.int32)
    scales_OG = torch.rand(OUTPUTS, INPUTS // GROUP)
    form = QuantLayout(bits, GROUP)
    codes = Codes(form=form, columns=(0, INPUTS), words=words_OW, scales=scales_OG, zeros=None)
    return quantized.pack_codes(codes, torch.bfloat16)


def rate(linear: Callable, x: torch.Tensor, weights: list) -> float:
    """Products a second, over one round."""
    done, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + ROUND_SECONDS:
        linear(x, weights[done % len(weights)])
        done += 1
    return done / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = [target.name for target in TARGETS if target.runs_here()]
    parser.add_argument(
        "--targets", default=",".join(["own", *here]), help="kinds of processors (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    known = {target.name: target for target in TARGETS}
    names = arguments.targets.split(",")
    compiled = {name: library.load(library.build(target=known.get(name))) for name in names}
    matrix = torch.randn(OUTPUTS, INPUTS).bfloat16()
    memory = measure_roofline(compiled[names[0]]).memory / 1e9
    print(f"{arguments.threads} threads, memory reads {memory:.1f} GB/s; GB/s of weights at 1 row, G(FL)OP/s at more")
    print(f"{'':12}{'rows':>5}" + "".join(f"{name:>16}" for name in names))
    made = {name: products(compiled[name]) for name in names}
    for form in made[names[0]]:
        by_name = {name: made[name][form] for name in names}
        first = by_name[names[0]][0](matrix.clone())
        copies = [first] + [by_name[names[0]][0](matrix.clone()) for _ in range(int(BYTES / first.nbytes) - 1)]
        for rows in ROWS:
            x = torch.randn(rows, INPUTS).bfloat16()
            rates: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(arguments.rounds):
                for name in names:
                    rates[name].append(rate(by_name[name][1], x, copies))
            scale = first.nbytes if rows == 1 else 2 * rows * OUTPUTS * INPUTS
            row = "".join(f"{statistics.median(rates[name]) * scale / 1e9:16.1f}" for name in names)
            print(f"{form:12}{rows:5}{row}", flush=True)


if __name__ == "__main__":
    main()
