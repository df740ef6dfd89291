"""Exact answers under load: hundreds of clients, cancelled requests, preemptions of both kinds, and ranks that are killed.

    python benchmarks/canaries.py --clients 300 --minutes 5 --kills 3 --json canaries.json

A supervised server of two ranks has room for a few sequences in its KV cache, and little swap space, so that sequences are
preempted by swapping and by recomputation. Clients stream answers of prompts whose text is known: greedy ones and sampled ones with a
seed, in float32, each computed alone before the load begins. One request in five hangs up in the middle. Exit status 1 where an
answer differs from the known one, a request ends in an error other than 503 with Retry-After, or one kind of preemption
did not happen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
from process_tree import is_rank, processes
from prometheus_client.parser import text_string_to_metric_families
from served import Served, serving

FLAGS = ("--dtype", "float32", "--num-kv-blocks", 160, "--preemption-mode", "swap", "--swap-space", 0.0004)
"""Some 2,500 tokens of KV cache, and swap space for an eighth of them."""
COUNTERS = {"preemptions": "vllm:num_preemptions_total", "swaps": "labinfer:num_swaps_total"}
HANGS_UP = 0.2
LOOK_EVERY = 0.5
RECOVERY_SECONDS = 60.0
"""Seconds after a kill until the server has to be well again."""
REFUSAL = 503


def make_requests(count: int, draw: random.Random) -> list[dict]:
    """Requests of several lengths; every second one is sampled with a seed of its own."""
    requests = []
    for index in range(count):
        prompt = f"{draw.randrange(100)} + {draw.randrange(100)} = " + "and then " * draw.choice((0, 5, 20, 60))
        sampling = {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0}
        length = {"max_tokens": draw.choice((8, 40, 120)), "ignore_eos": True}
        requests.append({"prompt": prompt, "stream": True, **length, **sampling})
    return requests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--launcher", choices=("mpirun", "torchrun"), default="mpirun")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flags = (*FLAGS, "--max-open-requests", 2 * args.clients)
    with serving(args.launcher, args.model, *flags, supervised=True) as server:
        figures = asyncio.run(Load(server, args).run())
    print(json.dumps(figures, indent=1, ensure_ascii=False))
    if args.json is not None:
        args.json.write_text(json.dumps(figures))
    return bool(figures["wrong"])


class Load:
    """The clients, and what they see.

    Args:
        args: of the command line.
    """

    def __init__(self, server: Served, args: argparse.Namespace):
        self._server, self._args = server, args
        self._draw = random.Random(args.seed)
        self._requests = make_requests(args.prompts, self._draw)
        self._texts: list[str] = []
        self._seen: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._recoveries: list[float] = []
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits)

    async def run(self) -> dict:
        """Known answers, then the load; returns the figures."""
        async with self._client:
            self._texts = [(await self._stream(request))[0] for request in self._requests]
            self._until = time.monotonic() + 60 * self._args.minutes
            clients = [self._be_client() for _ in range(self._args.clients)]
            await asyncio.gather(self._kill(), self._watch(), *clients)
        for name in COUNTERS:
            if not self._counts[name]:
                self._wrong.append(f"no {name}")
        if self._counts["swaps"] == self._counts["preemptions"]:
            self._wrong.append("no preemption by recomputation")
        return {
            "requests": dict(self._seen),
            "preemptions by swapping": self._counts["swaps"],
            "preemptions by recomputation": self._counts["preemptions"] - self._counts["swaps"],
            "recovery_seconds": self._recoveries,
            "wrong": self._wrong,
        }

    async def _be_client(self) -> None:
        """Ask one request after another."""
        while time.monotonic() < self._until:
            index = self._draw.randrange(len(self._requests))
            hangs_up = self._draw.randrange(1, 20) if self._draw.random() < HANGS_UP else None
            try:
                text, whole = await self._stream(self._requests[index], hangs_up)
            except Refused:
                self._seen["refused"] += 1
                await asyncio.sleep(self._draw.uniform(0.2, 1))
                continue
            except (httpx.HTTPError, AssertionError) as error:
                self._wrong.append(f"{type(error).__name__}: {error}"[:300])
                continue
            self._seen["whole" if whole else "hung up"] += 1
            expected = self._texts[index]
            if text != expected if whole else not expected.startswith(text):
                self._wrong.append(f"request {index}: {text!r} instead of {expected!r}")

    async def _stream(self, request: dict, hangs_up: int | None = None) -> tuple[str, bool]:
        """Text of an answer, and whether it came to its end; otherwise the client left after ``hangs_up`` events."""
        text, count = "", 0
        async with self._client.stream("POST", "/v1/completions", json=request) as answer:
            if answer.status_code == REFUSAL and "retry-after" in answer.headers:
                raise Refused
            assert answer.status_code == 200, (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return text, True
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
                    count += 1
                    if count == hangs_up:
                        return text, False
        raise AssertionError(f"the stream ended without [DONE] after {text!r}")

    async def _kill(self) -> None:
        """kill -9 of a rank at even intervals, and the time until the server is well again."""
        pause = 60 * self._args.minutes / (self._args.kills + 1)
        for _ in range(self._args.kills):
            await asyncio.sleep(pause)
            begin = time.monotonic()
            os.kill(self._draw.choice(processes(self._server.pid, is_rank)), signal.SIGKILL)
            self._seen["kills"] += 1
            for is_well in (False, True):
                while (await self._is_well()) != is_well and time.monotonic() - begin < RECOVERY_SECONDS:
                    await asyncio.sleep(0.05)
            if not await self._is_well():
                self._wrong.append(f"not well {RECOVERY_SECONDS:g} s after a kill")
            self._recoveries.append(round(time.monotonic() - begin, 1))

    async def _is_well(self) -> bool:
        return (await self._client.get("/health")).json()["status"] in ("ok", "idle")

    async def _watch(self) -> None:
        """Add up the counters of preemptions, which begin again at 0 with new ranks."""
        last: Counter[str] = Counter()
        while time.monotonic() < self._until:
            text = (await self._client.get("/metrics")).text
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            now = Counter({name: int(sum(s.value for s in samples if s.name == key)) for name, key in COUNTERS.items()})
            for name, value in now.items():
                self._counts[name] += value - last[name] if value >= last[name] else value
            last = now
            await asyncio.sleep(LOOK_EVERY)


class Refused(Exception):
    """The server has no room for a request now."""


if __name__ == "__main__":
    raise SystemExit(main())
