"""Three workloads, with the compiled functions and with torch's, in one run.

    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 DIR
    python benchmarks/workloads.py --model DIR

W1: one request, 128 tokens in, 128 out, tokens/s after the first. W2: 32 requests at once, 64 to 512 in, 32 to 128 out,
output tokens/s. W3: one request, 2,048 in, prompt tokens/s. Rounds alternate; figures are medians, ratios are taken within
a round.
"""

from __future__ import annotations

import argparse
import random
import statistics

from launched import launched, medians

from labinfer import SamplingParams
from labinfer.llm import LLM
from labinfer.observe.table import format_table

VARIANTS = ("reference", "auto")
CONTEXT, BATCH_TOKENS, BLOCKS = 4096, 2048, 1600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    base = {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": CONTEXT,
        "num_kv_blocks": BLOCKS,
        "max_num_batched_tokens": BATCH_TOKENS,
        "chunked_prefill_size": BATCH_TOKENS,
        "enable_prefix_caching": False,  # rounds repeat their prompts
    }
    with launched({name: base | {"functions": name} for name in VARIANTS}) as llms:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
        for number in range(args.rounds + 1):
            for name, llm in llms.items():
                figures = measure(llm)
                if number > 0:  # the first round warms up
                    rounds[name].append(figures)
        if next(iter(llms.values())).is_rank0:
            print_table(rounds)


def measure(llm: LLM) -> dict[str, float]:
    """One round; every rank runs it."""
    draw = random.Random(0)

    def run(lengths: list[tuple[int, int]]) -> None:
        prompts = [[draw.randrange(10, 4000) for _ in range(tokens)] for tokens, _ in lengths]
        llm.generate(prompts, [SamplingParams(max_tokens=out, ignore_eos=True) for _, out in lengths])

    run([(128, 128)])
    per_token = llm.report.time_per_output_token
    run([(2048, 1)])
    first = llm.report.time_to_first_token
    run([(draw.randint(64, 512), draw.randint(32, 128)) for _ in range(32)])
    if not llm.is_rank0:
        return {}
    return {
        "W1 decode": 1 / per_token[0],
        "W2 batch": llm.report.output_tokens / llm.report.wall_time,
        "W3 prefill": 2048 / first[0],
    }


def print_table(rounds: dict[str, list[dict[str, float]]]) -> None:
    middle = {name: medians(found) for name, found in rounds.items()}
    rows = []
    for workload in middle["auto"]:
        pairs = zip(rounds["auto"], rounds["reference"], strict=True)
        ratio = statistics.median(fast[workload] / plain[workload] for fast, plain in pairs)
        rows.append((workload, *(f"{middle[name][workload]:.1f}" for name in VARIANTS), f"{ratio:.2f}"))
    print(format_table(("workload, tokens/s", "torch's functions", "compiled functions", "ratio"), rows))


if __name__ == "__main__":
    main()
