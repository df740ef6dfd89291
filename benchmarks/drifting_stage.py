"""A stage whose machine becomes slower while streams run: when it is named, what --replan auto does, and what that gives (Linux, root).

    python benchmarks/drifting_stage.py --model demo --quota 0.5
    python benchmarks/drifting_stage.py --model DIR --hosts

Sixteen greedy requests at a time are answered, again and again, by two ranks with a stage each. Then rank 1 gets a CPU quota by cgroup
v1, with a period of 4 ms. Seconds until `/v1/cluster` names the stage and until the layers have been split anew; tokens a second before,
with the quota, behind the change, and with every other split, each by `POST /v1/cluster/layout`.

With --hosts it is the three uneven hosts of ``uneven_hosts.py``, started with ``--layout auto``; the second one is left half of its
quota, and what the change gives is compared with a server that is started anew with ``--layout auto`` on the hosts as they are then. A step
of the demo is shorter than a period of the quotas: take a model whose steps are not, such as the `small` shape with 24 layers.

Exit status 1 where the stage is not named within 30 s, the rate behind the change is below 0.9 of the best one, or an answer differs
from what it was before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from namespace_hosts import CGROUP, PERIOD_US, TRANSPORTS, enter_host, hosts, slowed
from process_tree import is_rank, processes, rank_number
from served import Served, serving
from uneven_hosts import QUOTAS

STREAMS, SLOW = 16, 1
"""Requests at a time, and the rank that becomes slower."""
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
    parser.add_argument(
        "--quota", type=float, default=0.5, help="CPUs that rank 1 has left; with --hosts, of its quota"
    )
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument(
        "--splits", type=int, default=3, help="splits on either side of the chosen one that are measured"
    )
    parser.add_argument("--hosts", action="store_true", help="three uneven hosts in place of two ranks")
    args = parser.parse_args()
    if not args.hosts:
        return compare_splits(args)
    with (
        tempfile.TemporaryDirectory() as directory,
        hosts(Path(directory), QUOTAS, delays=[0.0] * len(QUOTAS), mbit=1000.0) as launcher,
    ):
        os.environ.update(TRANSPORTS)
        enter_host(0)
        return compare_start([*launcher, sys.executable], args)


def compare_splits(args: argparse.Namespace) -> int:
    """Two ranks, of which one is slowed down, and all splits of the layers. Returns the exit status."""
    with serving("mpirun", args.model, "--dtype", args.dtype, "--replan", "auto") as served:
        trial = Trial(served, args.tokens)
        with trial.load():
            ranks = processes(served.pid, is_rank)
            slow_rank = next(pid for pid in ranks if rank_number(pid) == SLOW)
            with quota(slow_rank, args.quota):
                chosen = trial.follow()
                rates = {tuple(chosen): trial.rate()}
                for first in range(chosen[0] - args.splits, chosen[0] + args.splits + 1):
                    other = (first, sum(chosen) - first)
                    if min(other) >= 1 and other not in rates:
                        pause = change(served, other)
                        rates[other] = trial.rate()
                        print(f"which took a pause of {pause:.1f} s", flush=True)
    best = max(rates, key=rates.get)
    return trial.judge(rates[tuple(chosen)] / rates[best], f"the best split, {list(best)}")


def compare_start(command: list[str], args: argparse.Namespace) -> int:
    """Hosts, of which one is slowed down, and a new start on them. Returns the exit status."""
    flags = ["--dtype", args.dtype, "--layout", "auto", "--no-autotune"]
    with contextlib.ExitStack() as stack:
        with serving((command, flags), args.model, "--replan", "auto") as served:
            trial = Trial(served, args.tokens)
            with trial.load():
                stack.enter_context(slowed(SLOW, args.quota))
                trial.follow()
                rate = trial.rate()
        with serving((command, flags), args.model) as served:
            fresh = Trial(served, args.tokens)
            with fresh.load():
                fresh_rate = fresh.rate()
    fresh.compare(trial)
    trial.wrong += fresh.wrong
    return trial.judge(rate / fresh_rate, "a new start")


class Trial:
    """A server under load, and what it does when a stage becomes slower.

    Args:
        tokens: of each answer.
    """

    def __init__(self, served: Served, tokens: int):
        self._served, self._tokens = served, tokens
        self.wrong: list[str] = []
        self.texts: dict[int, str] = {}

    @contextmanager
    def load(self) -> Iterator[None]:
        """Keep the streams busy, from before until after the context."""
        self._load = Load(self._served, self._tokens)
        try:
            time.sleep(BASELINE_SECONDS)
            self.rate()
            yield
        finally:
            self._load.end()
            self.wrong += self._load.wrong
            self.texts = self._load.texts

    def rate(self) -> float:
        """Tokens a second as it is now."""
        time.sleep(SETTLE_SECONDS)
        rate = self._load.rate()
        print(f"layers {layers(self._served)}: {rate:.0f} tokens/s", flush=True)
        return rate

    def follow(self) -> list[int]:
        """Wait until the slow stage is named and the layers are split anew; how they are split then."""
        served, begin, split = self._served, time.monotonic(), layers(self._served)
        slow = next(rank["stage"] for rank in cluster(served)["ranks"] if rank["rank"] == SLOW)
        named = wait(lambda: cluster(served)["drift"]["slow_stage"] == slow, NAMED_SECONDS)
        print(f"named after {named:.0f} s: {cluster(served)['drift']}" if named else "not named", flush=True)
        print(f"layers {layers(served)} with the quota: {self._load.rate():.0f} tokens/s", flush=True)
        changed = wait(lambda: layers(served) != split, CHANGED_SECONDS)
        print(
            f"split anew {time.monotonic() - begin:.0f} s after the quota" if changed else "not split anew", flush=True
        )
        self.wrong += [] if named else ["the stage was not named in time"]
        self.wrong += [] if changed else ["the layers were not split anew"]
        return layers(served)

    def compare(self, other: Trial) -> None:
        """Note answers that differ from those of another one."""
        for number in self.texts.keys() & other.texts.keys():
            if self.texts[number] != other.texts[number]:
                self.wrong.append(f"request {number} was answered otherwise by a new start")

    def judge(self, fraction: float, best: str) -> int:
        """Print the final split and its speed as a fraction of the best. Returns the exit status."""
        print(f"{fraction:.2f} of {best}")
        self.wrong += [] if fraction >= LEAST_FRACTION else ["the layers are not split well"]
        print(*self.wrong, sep="\n")
        return int(bool(self.wrong))


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
