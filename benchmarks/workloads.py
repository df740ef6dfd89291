"""Three workloads on several variants of the engine in one run: compiled kernels, torch's, and ``--reproducible``.

    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 DIR
    python benchmarks/workloads.py --model DIR
    mpirun -n 2 python benchmarks/workloads.py --model DIR --tp 2 --variants auto reproducible

W1: one request, 128 tokens in, 128 out, tokens/s after the first. W2: 32 requests at once, 64 to 512 in, 32 to 128 out,
output tokens/s. W3: one request, 2,048 in, prompt tokens/s. Rounds alternate. Figures are medians. Ratios are medians of each
round's ratio to the first variant. On one rank, lines tell which share of the limit each figure is, with the roofline limits measured after
each round; ``labinfer/cli/bench/workload_limits.py`` says what a limit counts. ``--requests 8`` takes the first 8 requests of W2.
``compare.py`` runs the same workloads on other engines.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from launched import launched, medians

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.cli.bench.workload_limits import PackedBytes, WorkloadLimits
from labinfer.cli.bench.workloads import NUM_REQUESTS, USUAL_WORKLOADS, BenchWorkload, draw_workloads
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.roofline_limits import RooflineLimits
from labinfer.observe.report import RunReport
from labinfer.observe.table import format_table

VARIANTS = {
    "reference": {"functions": "reference"},
    "auto": {},
    "reproducible": {"reproducible": True},
    "any-cpu": {"reproducible": "any-cpu"},
}
"""Options of each variant."""
TITLES = {"reference": "torch's functions", "auto": "compiled functions"}
CONTEXT, BATCH_TOKENS, BLOCKS = 4096, 2048, 1600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["reference", "auto"], help="what to compare"
    )
    parser.add_argument("--workloads", nargs="+", choices=USUAL_WORKLOADS, default=USUAL_WORKLOADS, help="what to run")
    add_requests_option(parser)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks in a stage")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    base = {
        "model": args.model,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "tensor_parallel_size": args.tp,
        "max_model_len": CONTEXT,
        "num_kv_blocks": BLOCKS,
        "max_num_batched_tokens": BATCH_TOKENS,
        "chunked_prefill_size": BATCH_TOKENS,
        "enable_prefix_caching": False,  # rounds repeat their prompts
    }
    workloads = {name: work for name, work in draw_workloads(args.requests).items() if name in args.workloads}
    with launched({name: base | VARIANTS[name] for name in args.variants}) as llms:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in args.variants}
        shares: dict[str, list[dict[str, float]]] = {name: [] for name in args.variants}
        for number in range(args.rounds + 1):
            for name, llm in llms.items():
                figures = measure(llm, workloads)
                if number > 0:  # the first round warms up
                    rounds[name].append(figures)
            if number > 0 and next(iter(llms.values())).layout.topology.num_places == 1:
                rates = measure_rates()
                for name, llm in llms.items():
                    limits = find_limits(llm, workloads, rates)
                    figures = rounds[name][-1]
                    shares[name].append({figure: figures[figure] / limit for figure, limit in limits.items()})
        if next(iter(llms.values())).is_rank0:
            if args.requests < NUM_REQUESTS:
                print(f"W2: the first {args.requests} of {NUM_REQUESTS} requests")
            print_table(rounds)
            print_shares(rounds, shares)


def add_requests_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        type=int,
        choices=range(1, NUM_REQUESTS + 1),
        default=NUM_REQUESTS,
        metavar="N",
        help=f"run the first N of the {NUM_REQUESTS} requests of W2, for large models",
    )


def measure(llm: LLM, workloads: dict[str, BenchWorkload]) -> dict[str, float]:
    """Tokens a second in a round; every rank runs it."""
    speeds = {}
    for name, work in workloads.items():
        llm.generate(work.prompts, [SamplingParams(max_tokens=out, ignore_eos=True) for out in work.output_lens])
        if llm.is_rank0:
            speeds[f"{name} {work.figure}"] = speed(llm.report, work.figure)
    return speeds


def speed(report: RunReport, figure: str) -> float:
    """A workload's figure in the last run."""
    if figure == "decode":
        return 1 / report.time_per_output_token[0]
    if figure == "prefill":
        return report.prompt_tokens / report.time_to_first_token[0]
    return report.output_tokens / report.wall_time


def print_table(rounds: dict[str, list[dict[str, float]]]) -> None:
    middle = {name: medians(taken) for name, taken in rounds.items()}
    first, *others = rounds
    rows = []
    for workload in middle[first]:
        cells = [f"{figures[workload]:.1f}" for figures in middle.values()]
        ratios = [
            statistics.median(
                speeds[workload] / base[workload] for speeds, base in zip(rounds[other], rounds[first], strict=True)
            )
            for other in others
        ]
        rows.append((workload, *cells, *(f"{ratio:.3f}" for ratio in ratios)))
    titles = [TITLES.get(name, name) for name in rounds]
    ratio_titles = [f"{name} / {first}" for name in others]
    print(format_table(("workload, tokens/s", *titles, *ratio_titles), rows))


def measure_rates() -> RooflineLimits | None:
    """Roofline limits of this process's threads; None without compiled kernels."""
    provider = CpuProvider()
    provider.prepare(torch.device("cpu"))
    return provider.roofline_limits()


def find_limits(llm: LLM, workloads: dict[str, BenchWorkload], rates: RooflineLimits | None) -> dict[str, float]:
    """Limit of each workload's figure in tokens/s for a model on one rank; empty if they are not known."""
    if rates is None:
        return {}
    model = llm._parts.worker.runner.model
    limits = WorkloadLimits(model, PackedBytes.from_model(model), llm.layout.kv_dtype(llm.place), rates)
    if not limits.is_known:
        return {}
    return {f"{name} {work.figure}": limits.tokens_per_second(work) for name, work in workloads.items()}


def print_shares(rounds: dict[str, list[dict[str, float]]], shares: dict[str, list[dict[str, float]]]) -> None:
    """Print a line with the shares of the limits for each variant."""
    for name, taken in shares.items():
        if taken and taken[0]:
            speeds, middle = medians(rounds[name]), medians(taken)
            cells = [
                f"{workload} {speeds[workload]:.1f} tokens/s, {middle[workload]:.2f} of the limit"
                for workload in middle
            ]
            print(f"{name}: {'; '.join(cells)}")


if __name__ == "__main__":
    main()
