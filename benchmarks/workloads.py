"""Three workloads on several variants of the engine in one run: compiled kernels, torch's, and ``--reproducible``.

    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 DIR
    python benchmarks/workloads.py --model DIR
    mpirun -n 2 python benchmarks/workloads.py --model DIR --tp 2 --variants auto reproducible

W1: one request, 128 tokens in, 128 out, tokens/s after the first. W2: 32 requests at once, 64 to 512 in, 32 to 128 out,
output tokens/s. W3: one request, 2,048 in, prompt tokens/s. Rounds alternate. Figures are medians. Ratios are medians of each
round's ratio to the first variant. On one rank, a line tells which share of the memory bandwidth W1 takes: a token reads all
weights once, but of a mixture's experts only those that it is routed to. ``compare.py`` runs the same workloads on other engines.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass

import torch
from launched import launched, medians

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.expert_calls import ExpertsCall
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
USUAL_WORKLOADS = ("W1", "W2", "W3")
CONTEXT, BATCH_TOKENS, BLOCKS = 4096, 2048, 1600


@dataclass(frozen=True)
class Workload:
    """Requests that are given to an engine at once."""

    figure: str
    """Figure of the workload, in tokens a second: decoded after the first (``decode``), answered in all (``batch``), or read
    up to the first answered one (``prefill``)."""
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def length(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(prompt) + out for prompt, out in zip(self.prompts, self.output_lens, strict=True))


def draw_workloads() -> dict[str, Workload]:
    """W1, W2 and W3, and W1 behind a long prompt; the same in every process."""
    draw = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(10, 4000) for _ in range(tokens)]

    short, long = prompt(128), prompt(2048)
    lengths = [(draw.randint(64, 512), draw.randint(32, 128)) for _ in range(32)]
    return {
        "W1": Workload("decode", [short], [128]),
        "W2": Workload("batch", [prompt(tokens) for tokens, _ in lengths], [out for _, out in lengths]),
        "W3": Workload("prefill", [long], [1]),
        "W1-4k": Workload("decode", [prompt(4000)], [128]),
        "W1-16k": Workload("decode", [prompt(16000)], [128]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["reference", "auto"], help="what to compare"
    )
    parser.add_argument("--workloads", nargs="+", choices=USUAL_WORKLOADS, default=USUAL_WORKLOADS, help="what to run")
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
    workloads = {name: work for name, work in draw_workloads().items() if name in args.workloads}
    with launched({name: base | VARIANTS[name] for name in args.variants}) as llms:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in args.variants}
        for number in range(args.rounds + 1):
            for name, llm in llms.items():
                figures = measure(llm, workloads)
                if number > 0:  # the first round warms up
                    rounds[name].append(figures)
        if next(iter(llms.values())).is_rank0:
            print_table(rounds)
            if "auto" in rounds and "W1" in workloads and args.tp == 1:
                print_bound(llms["auto"], medians(rounds["auto"])["W1 decode"])


def measure(llm: LLM, workloads: dict[str, Workload]) -> dict[str, float]:
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


def print_bound(llm: LLM, tokens_per_second: float) -> None:
    """Share of a rank's memory rate that its weights take, read once for each token."""
    meta = llm.layout.meta(llm.place)
    num_bytes = meta.weight_bytes
    if calls := [call for call in meta.calls if isinstance(call, ExpertsCall)]:
        num_bytes -= round(meta.expert_bytes * (1 - calls[0].num_chosen / calls[0].all_experts))
    provider = CpuProvider()
    provider.prepare(torch.device("cpu"))
    if (limits := provider.roofline_limits()) is not None:
        share = num_bytes * tokens_per_second / limits.memory
        print(
            f"W1 decode: {100 * share:.0f} % of what rank 0's memory allows, with {num_bytes / 1e9:.3f} GB a token at "
            f"{limits.memory / 1e9:.1f} GB/s"
        )


if __name__ == "__main__":
    main()
