"""A stage whose machine becomes slower while streams run: when it is named, what --replan auto does, and what that gives (Linux, root).

    python benchmarks/drifting_stage.py --model demo --quota 0.5

Two ranks, a stage each, answer sixteen greedy requests at a time, again and again. Then rank 1 gets a CPU quota by cgroup v1, with a
period of 4 ms. Seconds until `/v1/cluster` names the stage and until the layers have been split anew; tokens a second before, with the
quota, behind the change, and with every other split, each by `POST /v1/cluster/layout`. Exit status 1 where the stage is not named
within 30 s, the rate behind the change is below 0.9 of the best split's, or an answer differs from what it was before.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from process_tree import is_rank, processes, rank_number
from served import Served, serving

STREAMS = 16
PERIOD_US = 4000
CGROUP = Path("/sys/fs/cgroup/cpu")
BASELINE_SECONDS, SETTLE_SECONDS, RATE_SECONDS = 30.0, 3.0, 10.0
NAMED_SECONDS, CHANGED_SECONDS = 30.0, 180.0
"""Longest time until the stage has to be named, and until the layers are given up to be split anew."""
LEAST_FRACTION = 0.9


class Load:
    """Requests that are sent again as soon as they are answered."""

    def __init__(self, served: Served, tokens: int):
        self._served, self._tokens = served, tokens
        self._is_over = False
        self.num_tokens, self.texts, self.wrong = 0, {}, []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        prompt = f"Once upon a time, {number + 2} "
        while not self._is_over:
            text = ""
            with urllib.request.urlopen(
                self._served.completion(prompt=prompt, max_tokens=self._tokens, stream=True)
            ) as answer:
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        self.wrong.append(str(event["error"]))
                    text += "".join(choice["text"] for choice in event.get("choices", ()))
                    self.num_tokens += 1
            if self.texts.setdefault(number, text) != text:
                self.wrong.append(f"request {number} was answered otherwise")

    def rate(self, seconds: float = RATE_SECONDS) -> float:
        """Pieces a second, which are tokens but for those without text."""
        before, begin = self.num_tokens, time.monotonic()
        time.sleep(seconds)
        return (self.num_tokens - before) / (time.monotonic() - begin)

    def end(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quota", type=float, default=0.5, help="CPUs that rank 1 has left")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument(
        "--splits", type=int, default=3, help="splits on either side of the chosen one that are measured"
    )
    args = parser.parse_args()
    wrong: list[str] = []
    with serving("mpirun", args.model, "--dtype", args.dtype, "--replan", "auto") as served:
        load = Load(served, args.tokens)
        try:
            time.sleep(BASELINE_SECONDS)
            print(f"layers {layers(served)}: {load.rate():.0f} tokens/s", flush=True)
            ranks = processes(served.pid, is_rank)
            with quota(next(pid for pid in ranks if rank_number(pid) == 1), args.quota):
                begin, split = time.monotonic(), layers(served)
                named = wait(lambda: cluster(served)["drift"]["slow_stage"] == 1, NAMED_SECONDS)
                print(f"named after {named:.0f} s: {cluster(served)['drift']}" if named else "not named", flush=True)
                print(f"layers {layers(served)} with the quota: {load.rate():.0f} tokens/s", flush=True)
                changed = wait(lambda: layers(served) != split, CHANGED_SECONDS)
                print(f"split anew {time.monotonic() - begin:.0f} s after the quota" if changed else "not split anew")
                time.sleep(SETTLE_SECONDS)
                chosen, rates = layers(served), {}
                rates[tuple(chosen)] = load.rate()
                print(f"layers {chosen}: {rates[tuple(chosen)]:.0f} tokens/s", flush=True)
                for first in range(chosen[0] - args.splits, chosen[0] + args.splits + 1):
                    other = (first, sum(chosen) - first)
                    if min(other) >= 1 and other not in rates:
                        pause = change(served, other)
                        time.sleep(SETTLE_SECONDS)
                        rates[other] = load.rate()
                        print(f"layers {list(other)}: {rates[other]:.0f} tokens/s (pause {pause:.1f} s)", flush=True)
            best = max(rates, key=rates.get)
            fraction = rates[tuple(chosen)] / rates[best]
            print(f"{fraction:.2f} of the best split, {list(best)}")
            wrong += [] if named else ["the stage was not named in time"]
            wrong += [] if changed and fraction >= LEAST_FRACTION else ["the layers are not split well"]
        finally:
            load.end()
    wrong += load.wrong
    print(*wrong, sep="\n")
    return int(bool(wrong))


@contextmanager
def quota(pid: int, cpus: float) -> Iterator[None]:
    """Give a process so many CPUs' worth of time."""
    group = CGROUP / f"drift{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * cpus)))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (CGROUP / "cgroup.procs").write_text(str(pid))
        time.sleep(0.2)
        group.rmdir()


def cluster(served: Served) -> dict:
    with urllib.request.urlopen(f"{served.url}/v1/cluster") as answer:
        described = json.load(answer)
    return described | {"drift": described["drift"] or {"slow_stage": None}}


def layers(served: Served) -> list[int]:
    return [rank["num_layers"] for rank in sorted(cluster(served)["ranks"], key=lambda rank: rank["stage"])]


def change(served: Served, split: tuple[int, ...]) -> float:
    """Have the layers split; the seconds of the pause."""
    body = json.dumps({"layers": split}).encode()
    request = urllib.request.Request(f"{served.url}/v1/cluster/layout", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["pause_seconds"]


def wait(condition, seconds: float) -> float:
    """Seconds until it is true; 0 where it is not in time."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        if condition():
            return time.monotonic() - begin
        time.sleep(0.25)
    return 0.0


if __name__ == "__main__":
    raise SystemExit(main())
