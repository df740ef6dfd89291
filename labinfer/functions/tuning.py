"""Which implementation is the fastest here: measured for each class of rows, remembered, agreed upon.

Only 16-bit models are tuned. Implementations differ in how they round, so with a choice by rows a request's numbers depend
on who else is in the batch; a float32 model gives the same tokens in every batch, and always takes the preferred ones.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from labinfer.functions.registry import ROW_CLASSES, Choice, Implementation
from labinfer.functions.trials import TRIAL_ROWS, Trials

SECONDS = 0.02
"""For the candidates of a function at one number of rows, undisturbed."""
MIN_ROUNDS, MAX_ROUNDS = 3, 30
PATIENCE = 10
"""How much longer than planned it may take where other processes disturb it."""
HOPELESS = 2.0
"""A candidate that takes so many times as long as the best is not tried further."""
MARGIN = 0.1
"""What another candidate must save to be taken instead of the preferred one: less is noise, and the same choice every time
gives the same tokens."""


class Timing(msgspec.Struct, frozen=True):
    """A candidate and its seconds for each class of rows."""

    name: str
    layout: str
    seconds: list[float]


Times = dict[str, list[Timing]]
"""By function, the preferred candidate last."""


def is_tuned(dtype: torch.dtype) -> bool:
    """Whether the implementations for a model of this number type may take turns."""
    return dtype.itemsize < torch.float32.itemsize


def measure(
    trials: Trials,
    candidates: Mapping[str, Mapping[str, Implementation]],
    seconds: float = SECONDS,
    hopeless: float = HOPELESS,
) -> Times:
    """Time these candidates of these functions at every number of rows."""
    times: Times = {}
    for target, of_target in candidates.items():
        by_class = []
        for rows in TRIAL_ROWS:
            calls = {name: trials.call(target, one, rows) for name, one in of_target.items()}
            by_class.append(race(calls, trials.finish, seconds, hopeless))
        times[target] = [
            Timing(name, one.layout, [found[name] for found in by_class]) for name, one in of_target.items()
        ]
        trials.forget_weights()
    return times


def race(
    calls: Mapping[str, Callable[[], object]],
    finish: Callable[[], None],
    seconds: float,
    hopeless: float = HOPELESS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The least seconds of each call. They take turns, so that what disturbs this machine disturbs all; a first round warms up.

    Args:
        finish: waits until what was called is done.
        seconds: about how long that may take, going by the least times: a call that was interrupted is worth repeating.
        hopeless: how far behind a call has to be to drop out.
    """
    best = dict.fromkeys(calls, math.inf)
    running, begin = dict(calls), clock()
    for number in range(1, MAX_ROUNDS + 1):
        for name, call in running.items():
            start = clock()
            call()
            finish()
            best[name] = min(best[name], clock() - start)
        if number < MIN_ROUNDS:
            continue
        quickest = min(best.values())
        running = {name: call for name, call in running.items() if best[name] <= hopeless * quickest}
        next_round = sum(best[name] for name in running)
        if number * next_round > seconds or clock() - begin > PATIENCE * seconds:
            break
    return best


def choose(ranks: Sequence[Times]) -> Choice:
    """The same choice for ranks that hold slices of the same layers, from the times of them all.

    They wait for each other in every layer, so the slowest counts. A layout is chosen by the mean over the classes of how
    much longer it takes, and within it an implementation for each class. Where candidates are not the same on all ranks,
    those that all have are chosen among.
    """
    choice = {}
    for target, timings in ranks[0].items():
        found = [{one.name: one for one in rank.get(target, [])} for rank in ranks]
        common = [one for one in timings if all(one.name in others for others in found)]
        if not common:
            continue
        slowest = {
            one.name: [max(of_class) for of_class in zip(*(rank[one.name].seconds for rank in found), strict=True)]
            for one in common
        }
        layouts: dict[str, list[str]] = {}
        for one in common:
            layouts.setdefault(one.layout, []).append(one.name)
        preferred = common[-1].layout
        costs = {layout: _mean_log(slowest[name] for name in names) for layout, names in layouts.items()}
        layout = min(costs, key=costs.__getitem__)
        if costs[layout] > costs[preferred] + math.log(1 - MARGIN):
            layout = preferred
        choice[target] = tuple(
            _fastest({name: slowest[name][index] for name in layouts[layout]}) for index in range(len(TRIAL_ROWS))
        )
    return choice


def describe(choice: Choice) -> str:
    """``linear cpu-dot, from 129 rows cpu; …``, for people."""
    parts = []
    for target, names in choice.items():
        spans = [names[0]]
        spans += [
            f"from {ROW_CLASSES[index - 1] + 1} rows {name}"
            for index, name in enumerate(names)
            if index > 0 and name != names[index - 1]
        ]
        parts.append(f"{target.removeprefix('layers.')} {', '.join(spans)}")
    return "; ".join(parts)


def _mean_log(seconds_of_each) -> float:
    least = [min(of_class) for of_class in zip(*seconds_of_each, strict=True)]
    return sum(math.log(max(seconds, 1e-9)) for seconds in least) / len(least)


def _fastest(seconds: Mapping[str, float]) -> str:
    """The last is the preferred one."""
    preferred = list(seconds)[-1]
    name = min(seconds, key=seconds.__getitem__)
    return name if seconds[name] < (1 - MARGIN) * seconds[preferred] else preferred


# What was measured is remembered, one file for each rank's circumstances.


def file_name(*circumstances: object) -> str:
    """A name that another machine, library, model or number of threads does not have."""
    digest = hashlib.blake2b(repr((TRIAL_ROWS, ROW_CLASSES, *circumstances)).encode(), digest_size=8)
    return f"times-{digest.hexdigest()}.json"


def read_times(path: Path, trials: Trials) -> Times | None:
    """What was written there; None where nothing was, or not what these trials would give."""
    try:
        times = msgspec.json.decode(path.read_bytes(), type=Times)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    expected = {
        target: [(name, one.layout) for name, one in candidates.items()]
        for target, candidates in trials.rivals().items()
    }
    found = {target: [(one.name, one.layout) for one in timings] for target, timings in times.items()}
    seconds = [one.seconds for timings in times.values() for one in timings]
    plausible = all(len(each) == len(TRIAL_ROWS) and all(0 < s < math.inf for s in each) for each in seconds)
    return times if found == expected and plausible else None


def write_times(path: Path, times: Times) -> None:
    """The file is there when it is complete, so several processes may write it at once.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        unfinished = Path(directory) / path.name
        unfinished.write_bytes(msgspec.json.encode(times))
        os.replace(unfinished, path)
