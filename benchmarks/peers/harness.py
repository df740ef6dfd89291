"""Measuring and flags for the runners of all engines. Standard library only: each runs in an environment of its own.

A runner is called by ``benchmarks/compare.py`` and prints one JSON line: tokens a second for each workload, or
``{"skip": why}``, and the engine's version. Every figure is taken in the same way, from the outside, so that no engine's own clock is trusted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

OnToken = Callable[[], None]
"""Called when tokens have come."""
Generate = Callable[[list[list[int]], list[int], OnToken], list[int]]
"""Answers prompts greedily, without any end token. Takes the prompts and the length of each answer, and what an engine that tells of
tokens as they come calls then; returns the number of tokens of each."""


LEAST_CONTEXT = 4096


class Unavailable(Exception):
    """Unavailable combination: the engine does not support the precision."""


def run(
    package: str,
    load: Callable[[argparse.Namespace], Generate],
    prepare: Callable[[argparse.Namespace], None] | None = None,
    *,
    can_draft: bool = False,
) -> None:
    """Measure one engine at one precision.

    A ``Generate`` may have an attribute ``find_limits``: a function from workloads to limits in tokens/s, by name.

    Args:
        package: whose version is named beside the figures.
        load: the engine over ``args.model``, at ``args.precision``, with ``args.threads`` threads and room for
            ``args.context`` tokens of a request.
        prepare: converts ``args.checkpoint`` to the folder ``args.model``; left out where it is read as it is.
        can_draft: whether ``load`` heeds ``args.draft_model``, which drafts ``args.draft_tokens`` tokens at a time; None for no drafts.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--converted", type=Path, required=True, help="folder of the converted checkpoint")
    parser.add_argument("--workloads", type=Path, required=True, help="JSON: prompts and output_lens by name")
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument(
        "--variant", default="", help="what the engine's name ends with, such as the dtype it calculates in"
    )
    parser.add_argument("--draft", type=Path, help="checkpoint of a draft model")
    parser.add_argument("--draft-tokens", type=int, default=0)
    parser.add_argument("--prepare", action="store_true", help="convert only")
    args = parser.parse_args()
    try:
        if args.draft and not can_draft:
            raise Unavailable("this runner has no draft models")
        args.model = _converted(args, prepare) if prepare else args.checkpoint
        args.draft_model = args.draft
        if args.draft and prepare:
            other = {"checkpoint": args.draft, "converted": args.converted.with_name(f"draft-{args.converted.name}")}
            args.draft_model = _converted(argparse.Namespace(**vars(args) | other), prepare)
        answer = {"version": metadata.version(package)}
        if not args.prepare:
            workloads = json.loads(args.workloads.read_text())
            args.context = max([LEAST_CONTEXT, *map(longest, workloads.values())])
            generate = load(args)
            answer |= measure(generate, workloads)
            if find_limits := getattr(generate, "find_limits", None):
                answer["limits"] = find_limits(workloads)
    except Unavailable as reason:
        answer = {"skip": str(reason)}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


def measure(generate: Generate, workloads: dict[str, dict]) -> dict[str, float]:
    """Tokens a second of the workloads of ``benchmarks/workloads.py``, each after a warm-up of its own.

    That of a decode is as long as what is measured: pages of a mixture's experts are touched when the first token needs them.
    """
    speeds = {}
    for name, work in workloads.items():
        prompts, lengths = work["prompts"], work["output_lens"]
        timed(generate, prompts, lengths if work["figure"] == "decode" else [2] * len(prompts))
        seconds, first = timed(generate, prompts, lengths)
        if work["figure"] == "decode":  # all but the first token, as the time to it is that of the prompt
            if first is None:  # a difference of two long times, where the prompt is long
                first, _ = timed(generate, prompts, [1] * len(prompts))
            speeds[name] = (sum(lengths) - len(prompts)) / (seconds - first)
        else:
            speeds[name] = sum(map(len, prompts) if work["figure"] == "prefill" else lengths) / seconds
    return speeds


def longest(work: dict) -> int:
    """Tokens of a workload's longest prompt with its answer."""
    return max(len(prompt) + out for prompt, out in zip(work["prompts"], work["output_lens"], strict=True))


def timed(generate: Generate, prompts: list[list[int]], lengths: list[int]) -> tuple[float, float | None]:
    """Seconds of a call that must answer as long as it was asked to, and seconds to the first token; None where the engine does not
    tell."""
    times: list[float] = []
    begin = time.perf_counter()
    got = generate(prompts, lengths, lambda: times.append(time.perf_counter()))
    seconds = time.perf_counter() - begin
    if got != lengths:
        raise RuntimeError(f"answers of {got} tokens came, not of {lengths}")
    return seconds, times[0] - begin if times else None


def _converted(args: argparse.Namespace, prepare: Callable[[argparse.Namespace], None]) -> Path:
    """The converted checkpoint; it appears under its name when it is complete."""
    if not args.converted.exists():
        args.model = args.converted.with_suffix(".unfinished")
        args.model.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(args.model, ignore_errors=True)  # of a try that was broken off
        if args.model.is_symlink() or args.model.exists():
            args.model.unlink()
        prepare(args)
        args.model.rename(args.converted)
    return args.converted
