"""Time of a decode step that is no reading of weights: that of a model of 24 layers whose weights cost next to nothing.

    python tools/random_checkpoint.py --shape thin --dtype bfloat16 DIR
    python benchmarks/step_overhead.py --model DIR --threads 1 2

One request, 128 tokens in, 128 out, the time per token after the first; the median and the least of the rounds. Beside it what the
parts of such a step take on rank 0: the layers, the head, all the rest (scheduling, inputs, choice of the token, text).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from labinfer import LLM, SamplingParams
from labinfer.worker.step_graphs import StepGraphs

TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    spent = _time_parts()
    for threads in args.threads:
        for quantization in args.quantization:
            with LLM(args.model, threads=threads, quantization=quantization, enable_prefix_caching=False) as llm:
                print(f"{threads} threads, {quantization}: {_measure(llm, args.rounds, spent)}", flush=True)


def _time_parts() -> dict[str, float]:
    """Seconds in the layers and in the head of all steps from now on, by "layers" and "head"."""
    spent = {"layers": 0.0, "head": 0.0}

    def timed(call: Callable) -> Callable:
        def run(graphs, batch, hidden_TD):
            begin = time.perf_counter()
            out = call(graphs, batch, hidden_TD)
            if len(batch.token_ids_T) == 1:  # no prompt
                spent["layers" if hidden_TD is None else "head"] += time.perf_counter() - begin
            return out

        return run

    StepGraphs.__call__ = timed(StepGraphs.__call__)
    return spent


def _measure(llm: LLM, rounds: int, spent: dict[str, float]) -> str:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    totals, layers, heads = [], [], []
    for number in range(rounds + 1):
        spent.update(layers=0.0, head=0.0)
        llm.generate([list(range(10, 10 + TOKENS))], params)
        if number:  # the first round warms up
            totals.append(1e3 * llm.report.time_per_output_token[0])
            layers.append(1e3 * spent["layers"] / TOKENS)
            heads.append(1e3 * spent["head"] / TOKENS)
    middle = [statistics.median(times) for times in (totals, layers, heads)]
    return (
        f"{middle[0]:.2f} ms a token (least {min(totals):.2f}); layers {middle[1]:.2f}, head {middle[2]:.2f}, "
        f"the rest {middle[0] - middle[1] - middle[2]:.2f}"
    )


if __name__ == "__main__":
    main()
