"""Tokens a second with drafts, as a multiple of those without: each call in turn with and without, in one launch, by its fastest round.

    python benchmarks/speculation.py
    python benchmarks/speculation.py --config '{"model": "demo-draft"}'
    mpirun -n 2 python benchmarks/speculation.py --model DIR
    python benchmarks/speculation.py --hops-ms 10
    python benchmarks/speculation.py --hops-ms 5 --hosts 4 --tasks editing

The last two start themselves on hosts that are network namespaces, with a delay on the way from each to the next (Linux, root). In a
pipeline whose stages have further chunks of a sequence on their way drafts are also measured with one chunk at a time; on one machine that
takes ``"continuous": true`` in --config.

Tasks: ``answers`` are the bundled held-out conversations, one at a time; in ``editing`` a text of these is to be given back
with every eighth line changed, one at a time. What a model would write does not matter there: the answer is the only
choice (``structured_outputs``), in both variants, so any model with a tokenizer will do, and drafts that find the text in the
prompt are right as often as with one that edits well. ``alone`` is one greedy answer to random tokens, for a model with a draft model
that was constructed to agree with it (``tools/random_checkpoint.py``). ``many`` are 64 sequences of random tokens at once; ``random`` is one with a
drafter that is never right.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from launched import launched
from namespace_hosts import TRANSPORTS, hosts

import labinfer
from labinfer import LLM, SamplingParams, StructuredOutputs
from labinfer.observe.report import RunReport
from labinfer.observe.table import format_table

HELD_OUT = Path(labinfer.__file__).parent / "assets" / "held-out" / "conversations.jsonl"
LINES, CHANGED_EVERY = 24, 8
TASKS = ("answers", "editing", "alone", "many", "random")
AT_ONCE = ("many", "random")


class RandomDrafter:
    """Drafts tokens without a look at what is there."""

    def __init__(self, vocab_size: int):
        self._draw, self._vocab_size = random.Random(0), vocab_size

    def propose(self, sequences, limits):
        return [[self._draw.randrange(self._vocab_size) for _ in range(limit)] for limit in limits]

    def forget(self, sequences):
        pass


def conversations() -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]


def spread(items: list, count: int) -> list:
    """``count`` items at even distances, as items of one kind are adjacent in the list."""
    return items[:: max(1, len(items) // count)][:count]


def editing_task() -> tuple[str, str]:
    """A prompt with a text, and the text with some of its lines changed."""
    lines = [" ".join(message["content"] for message in messages) for messages in conversations()]
    text = [line for line in lines if line.isascii()][:LINES]
    edited = [f"{line} (checked)" if number % CHANGED_EVERY == 0 else line for number, line in enumerate(text, 1)]
    return "Mark every eighth line as checked:\n" + "\n".join(text) + "\n\n", "\n".join(edited)


def make_task(name: str, llm: LLM, num_answers: int) -> tuple[list, SamplingParams, bool]:
    """Prompts, sampling, and whether all prompts run at once."""
    if name == "editing":
        prompt, answer = editing_task()
        return [prompt], SamplingParams(max_tokens=1024, structured_outputs=StructuredOutputs(choice=[answer])), False
    if name == "answers":
        return (
            [{"messages": messages[:-1]} for messages in spread(conversations(), num_answers)],
            SamplingParams(),
            False,
        )
    draw = random.Random(1)
    prompts = [[draw.randrange(llm.spec.vocab_size) for _ in range(32)] for _ in range(64 if name == "many" else 1)]
    if name == "alone":
        return prompts, SamplingParams(max_tokens=128, ignore_eos=True, temperature=0.0), False
    return prompts, SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.8), True


@dataclass
class Figures:
    """Figures of a task in one variant; times are those of each call's fastest round."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: dict[int, float] = field(default_factory=dict)
    cpu_seconds: dict[int, float] = field(default_factory=dict)
    """CPU seconds of rank 0, likewise."""

    def add(self, call: int, report: RunReport, cpu: float, number: int) -> None:
        """Count a call, whose tokens are the same in every round."""
        self.seconds[call] = min(report.wall_time, self.seconds.get(call, math.inf))
        self.cpu_seconds[call] = min(cpu, self.cpu_seconds.get(call, math.inf))
        self.tokens += report.output_tokens if number == 1 else 0
        self.drafted += report.counts["drafted"]
        self.accepted += report.counts["accepted"]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / sum(self.seconds.values())

    @property
    def cpu(self) -> float:
        """CPU seconds of rank 0 for each thousand tokens."""
        return 1000 * sum(self.cpu_seconds.values()) / self.tokens


def run_task(llm: LLM, name: str, num_answers: int, num_rounds: int) -> dict[str, Figures]:
    """Figures with and without drafts, and with one chunk at a time where there are more, in turn for each call; none on ranks other
    than 0. A first round warms up."""
    prompts, params, at_once = make_task(name, llm, num_answers) if llm.is_rank0 else (None, None, name in AT_ONCE)
    calls = [prompts] if at_once else [[prompt] for prompt in prompts] if prompts else []
    drafts = llm.engine.scheduler.drafts if llm.is_rank0 else None
    given, continuous = (drafts.proposer, drafts.continuous) if drafts else (None, False)
    of_rank0 = llm.group.comm.all_gather_bytes(f"{len(calls)} {continuous:d}".encode())[0]
    num_calls, has_chunks_behind = map(int, of_rank0.split())
    variants = ("with", "without", "one_chunk") if has_chunks_behind else ("with", "without")
    figures = {variant: Figures() for variant in variants}
    drafter = RandomDrafter(llm.spec.vocab_size) if name == "random" else given
    for number, index, variant in product(range(num_rounds + 1), range(num_calls), figures):
        if drafts:
            drafts.proposer = None if variant == "without" else drafter
            drafts.continuous = continuous and variant == "with"
        begin = time.process_time()
        llm.generate(calls[index] if calls else None, params)
        if number and llm.is_rank0:
            figures[variant].add(index, llm.report, time.process_time() - begin, number)
    if drafts:
        drafts.proposer, drafts.continuous = given, continuous
    return figures if llm.is_rank0 else {}


def measure(args: argparse.Namespace) -> None:
    flat = {
        "model": args.model,
        "speculative_config": args.config,
        "enable_prefix_caching": False,
        "memory_utilization": 0.3,
        "threads": args.threads,
        "ranks": args.ranks,
    }
    with launched({"speculation": flat}) as llms:
        for name in args.tasks:
            figures = run_task(llms["speculation"], name, args.answers, args.rounds)
            if figures:
                report(name, args.rounds, figures)


def report(name: str, num_rounds: int, figures: dict[str, Figures]) -> None:
    with_drafts, without_drafts, one_chunk = figures["with"], figures["without"], figures.get("one_chunk")
    row = (
        name,
        f"{without_drafts.speed:.1f}",
        f"{with_drafts.speed:.1f}",
        f"{with_drafts.speed / without_drafts.speed:.2f}",
        f"{without_drafts.cpu / with_drafts.cpu:.2f}",
        f"{with_drafts.drafted / with_drafts.tokens / num_rounds:.2f}",
        f"{100 * with_drafts.accepted / max(1, with_drafts.drafted):.0f} %",
        f"{with_drafts.speed / one_chunk.speed:.2f}" if one_chunk else "-",
    )
    header = (
        "task",
        "tokens/s without",
        "with",
        "speed",
        "by CPU time",
        "drafted a token",
        "accepted",
        "of one chunk's",
    )
    print(format_table(header, [row]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--config", default='{"method": "ngram"}')
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--answers", type=int, default=40, help="held-out conversations")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--ranks", help="as launch.py's, where a spare rank drafts")
    parser.add_argument("--hops-ms", type=float, help="hosts with this delay each way between them")
    parser.add_argument("--hosts", type=int, default=2, help="hosts, where hops have a delay")
    args = parser.parse_args()
    if args.hops_ms is None:
        measure(args)
        return
    place = sys.argv.index("--hops-ms")
    command = [sys.executable, *sys.argv[:place], *sys.argv[place + 2 :]]
    delays = [args.hops_ms / 2000] * args.hosts
    with (
        tempfile.TemporaryDirectory() as directory,
        hosts(Path(directory), [1.0] * args.hosts, delays=delays, mbit=1000.0) as start,
    ):
        environment = [word for name, value in TRANSPORTS.items() for word in ("-genv", name, value)]
        subprocess.run([*start, *environment, *command], check=True)


if __name__ == "__main__":
    main()
