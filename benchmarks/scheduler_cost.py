"""Cost of the scheduler in a step, without a model: many sequences that decode, with a full queue behind them.

python benchmarks/scheduler_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import time

from labinfer.base.config import SCHEDULING_POLICIES, CacheOptions, SchedulerOptions
from labinfer.base.plan import BatchResult, EntryResult
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.assemble import make_scheduler
from labinfer.engine.request import Request
from labinfer.engine.sequence import Sequence, token_sampling
from labinfer.engine.spec import EngineSpec
from labinfer.observe.table import format_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()

    rows = []
    for policy in SCHEDULING_POLICIES:
        for num_stages in (1, 2):
            times = measure(args, policy, num_stages)
            rows.append((policy, num_stages, f"{1e6 * statistics.median(times):.0f} us", f"{1e6 * max(times):.0f} us"))
    print(format_table(("policy", "micro-batches", "schedule + update, median", "largest"), rows))


def measure(args: argparse.Namespace, policy: str, num_stages: int) -> list[float]:
    """Seconds of ``schedule`` and ``update`` for each step in which all of them decode."""
    options = SchedulerOptions(max_num_seqs=args.running, max_num_batched_tokens=4096, scheduling_policy=policy)
    per_sequence = -(-(args.prompt_tokens + 2 * args.steps) // 16)
    spec = EngineSpec(
        num_stages=num_stages,
        num_blocks=args.running * per_sequence,
        vocab_size=args.running + args.waiting,
        hidden_size=1,
        max_model_len=10**6,
    )
    scheduler = make_scheduler(spec, cache=CacheOptions(block_size=16), scheduling=options, clock=time.monotonic)
    for number in range(args.running + args.waiting):
        prompt = [number] * args.prompt_tokens
        request = Request(
            key=number, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=10**6), user=str(number % 7)
        )
        scheduler.add(
            Sequence(
                seq_id=number,
                request=request,
                token_ids=list(prompt),
                token_sampling=token_sampling(request, 0, []),
                max_tokens=10**6,
                max_context=10**6,
            )
        )
    times = []
    while len(times) < args.steps:
        begin = time.perf_counter()
        plans = []
        while (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        oldest = scheduler.in_flight[0].plan
        sampled = [EntryResult((7,) * entry.num_samples) for entry in oldest.entries]
        scheduler.update(BatchResult(oldest.step_id, sampled))
        seconds = time.perf_counter() - begin
        if len(plans) == 1 and plans[0].num_tokens == len(plans[0].entries):  # no prompts any more
            times.append(seconds)
    return times


if __name__ == "__main__":
    main()
