"""A supervised server under load for long: ranks killed, callers that hang up, ten times too many requests at once.

    python benchmarks/soak.py --minutes 20 --launcher mpirun --json soak.json

Requests arrive at half of the rate that the server was measured to take; one in five hangs up. Every minute ten times as many come
for some seconds, and every three minutes a rank is killed. The same greedy prompts are asked at the start, all the while and at the
end. Exit status 1 where a check fails: an answer differs, a refusal is anything but 503 with Retry-After, an accepted request ends in an
error, one in a hundred takes twice as long in a burst, KV blocks stay in use, a killed rank is not replaced within a minute, or the
gateway is replaced or its memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from process_tree import is_gateway, is_rank, own_megabytes, processes
from prometheus_client.parser import text_string_to_metric_families
from served import Served, serving

CANARIES = [
    {"prompt": f"{a} + {b} = ", "max_tokens": 24, "temperature": 0} for a, b in ((1, 2), (17, 25), (30, 40), (8, 61))
]
MEASURED = {"prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True}
"""Requests whose times are compared: always as long."""
OTHERS = [
    MEASURED | {"seed": 7, "temperature": 0.8, "logprobs": 3},
    MEASURED | {"n": 2, "max_tokens": 16},
    {"messages": [{"role": "user", "content": "17 + 25 = ?"}], "max_tokens": 48, "temperature": 0},
    {"prompt": "A number: ", "max_tokens": 12, "structured_outputs": {"regex": "[0-9]{1,4}"}},
    {"prompt": "word " * 300, "max_tokens": 8},
]
HANGS_UP = 0.2
CALM_SHARE = 0.5
"""Request rate of calm phases, as a fraction of the measured maximum."""
BURST = 10.0
BURST_SECONDS, BURST_EVERY, KILL_EVERY, CANARY_EVERY, LOOK_EVERY = 4.0, 60.0, 180.0, 20.0, 5.0
PILED_UP_SECONDS = 5.0
"""After a burst or a recovery, until what has waited is done. Requests that come in this time count with the burst, or not at all."""
RECOVERY_SECONDS = 60.0
SETTLED_SECONDS = 240.0
"""Until the gateway has had every kind of request and burst, its memory is not looked at."""
MOST_GROWTH = 0.1
"""MB a minute."""
REFUSAL = 503
WELL = ("ok", "idle")


@dataclass(kw_only=True)
class Soak:
    """Observations of a soak test: statuses, errors and latencies."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """One line for each thing that must not happen."""
    times: dict[str, list[float]] = field(default_factory=lambda: {"calm": [], "burst": []})
    """Seconds of accepted requests of the same length, by when they came."""
    pauses: list[float] = field(default_factory=list)
    """Seconds from each kill until the server was well again."""
    gateway: list[tuple[float, float]] = field(default_factory=list)
    """Minutes since the start, and MB of the gateway's own memory."""
    gateway_pids: set[int] = field(default_factory=set)
    is_burst: bool = False
    is_piled_up: bool = False
    """A burst is on, or was just before."""
    is_hurt: bool = False
    """A rank was killed, and the server is not well again."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--launcher", choices=("mpirun", "torchrun"), default="mpirun")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flags = ("--max-open-requests", 24, "--max-num-seqs", 16)
    with serving(args.launcher, args.model, *flags, supervised=True) as server:
        soak = asyncio.run(run(server, args.minutes * 60, random.Random(args.seed)))
    return report(soak, args.json)


async def run(server: Served, seconds: float, draw: random.Random) -> Soak:
    """Everything that happens to the server."""
    soak = Soak()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        expected = [await ask(client, canary) for canary in CANARIES]
        rate = CALM_SHARE * await highest_rate(client)
        print(f"{rate:.1f} requests a second, {BURST:g} times as many in bursts", flush=True)
        begin = time.monotonic()
        until = begin + seconds
        await asyncio.gather(
            arrive(client, soak, rate, until, draw),
            every(BURST_EVERY, until, lambda: burst(soak)),
            every(KILL_EVERY, until - 30, lambda: kill_rank(client, server, soak, draw)),
            every(CANARY_EVERY, until, lambda: check_canaries(client, soak, expected)),
            every(LOOK_EVERY, until, lambda: look(server, soak, begin)),
        )
        await settle(client)
        await check_canaries(client, soak, expected)
        await settle(client)  # figures come a moment after answers
        for name, value in (await state(client)).items():
            if value:
                soak.wrong.append(f"{name} is {value} at the end")
    return soak


async def ask(client: httpx.AsyncClient, body: dict) -> str:
    """The answer, asked again while the server refuses."""
    while True:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != REFUSAL:
            answer.raise_for_status()
            return answer.json()["choices"][0]["text"]
        await asyncio.sleep(0.5)


async def highest_rate(client: httpx.AsyncClient, at_once: int = 16, seconds: float = 8.0) -> float:
    """Requests a second that the server ends when so many are always open."""
    count, until = 0, time.monotonic() + seconds

    async def one_caller() -> None:
        nonlocal count
        while time.monotonic() < until:
            await ask(client, MEASURED)
            count += 1

    await asyncio.gather(*(one_caller() for _ in range(at_once)))
    return count / seconds


async def arrive(client: httpx.AsyncClient, soak: Soak, rate: float, until: float, draw: random.Random) -> None:
    """Requests as a Poisson process."""
    requests: set[asyncio.Task] = set()
    while time.monotonic() < until:
        await asyncio.sleep(draw.expovariate(rate * (BURST if soak.is_burst else 1)))
        body = MEASURED if draw.random() < 0.5 else draw.choice(OTHERS)
        hangs_up = draw.uniform(0, 0.5) if draw.random() < HANGS_UP else None
        request = asyncio.create_task(one_request(client, soak, body, hangs_up))
        requests.add(request)
        request.add_done_callback(requests.discard)
    await asyncio.gather(*requests)


async def one_request(client: httpx.AsyncClient, soak: Soak, body: dict, hangs_up: float | None) -> None:
    """Stream an answer, or hang up after so many seconds."""
    when, was_hurt, begin = "burst" if soak.is_piled_up else "calm", soak.is_hurt, time.monotonic()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        lines = await asyncio.wait_for(stream(client, soak, path, body | {"stream": True}), hangs_up)
    except asyncio.TimeoutError:
        soak.statuses["hung up"] += 1
        return
    except httpx.HTTPError as error:
        soak.wrong.append(f"{type(error).__name__}: {error}")
        return
    if not lines:
        return
    if lines[-1] != "data: [DONE]" or any('"error"' in line for line in lines):
        soak.wrong.append(f"a stream ended with {lines[-1][:200]}")
    elif body is MEASURED and not (was_hurt or soak.is_hurt):
        soak.times[when].append(time.monotonic() - begin)


async def stream(client: httpx.AsyncClient, soak: Soak, path: str, body: dict) -> list[str]:
    """The events of an answer; none where it was refused."""
    async with client.stream("POST", path, json=body) as answer:
        soak.statuses[str(answer.status_code)] += 1
        if answer.status_code != 200:
            if answer.status_code != REFUSAL or "retry-after" not in answer.headers:
                soak.wrong.append(f"status {answer.status_code}: {(await answer.aread()).decode()[:200]}")
            return []
        return [line async for line in answer.aiter_lines() if line.startswith("data:")] or ["nothing"]


async def every(seconds: float, until: float, act) -> None:
    while time.monotonic() + seconds < until:
        await asyncio.sleep(seconds)
        await act()


async def burst(soak: Soak) -> None:
    soak.is_burst = soak.is_piled_up = True
    await asyncio.sleep(BURST_SECONDS)
    soak.is_burst = False
    await asyncio.sleep(PILED_UP_SECONDS)
    soak.is_piled_up = False


async def kill_rank(client: httpx.AsyncClient, server: Served, soak: Soak, draw: random.Random) -> None:
    """kill -9 of a rank, and the time until the server is well again."""
    soak.is_hurt, begin = True, time.monotonic()
    os.kill(draw.choice(processes(server.pid, is_rank)), signal.SIGKILL)
    for is_well in (False, True):  # first it has to be noticed
        while ((await client.get("/health")).json()["status"] in WELL) != is_well:
            if time.monotonic() - begin > RECOVERY_SECONDS:
                soak.wrong.append(
                    f"{RECOVERY_SECONDS:g} s after a kill the server is {'not well' if is_well else 'as before'}"
                )
                return
            await asyncio.sleep(0.02)
    soak.pauses.append(time.monotonic() - begin)
    await asyncio.sleep(PILED_UP_SECONDS)
    soak.is_hurt = False


async def check_canaries(client: httpx.AsyncClient, soak: Soak, expected: list[str]) -> None:
    for canary, text in zip(CANARIES, expected, strict=True):
        if (answer := await ask(client, canary)) != text:
            soak.wrong.append(f"{canary['prompt']!r} was answered {answer!r} instead of {text!r}")
        soak.statuses["canaries"] += 1


async def look(server: Served, soak: Soak, begin: float) -> None:
    for pid in processes(server.pid, is_gateway):
        soak.gateway_pids.add(pid)
        soak.gateway.append(((time.monotonic() - begin) / 60, own_megabytes(pid)))


async def state(client: httpx.AsyncClient) -> dict[str, float]:
    """Requests and KV blocks that the server has."""
    text = (await client.get("/metrics")).text
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    values = {sample.name: sample.value for sample in samples if sample.name in names}
    assert len(values) == len(names), text
    return values


async def settle(client: httpx.AsyncClient, seconds: float = 60.0) -> None:
    """Wait until the server has nothing left to do, or so long."""
    until = time.monotonic() + seconds
    while any((await state(client)).values()) and time.monotonic() < until:
        await asyncio.sleep(0.5)


def report(soak: Soak, path: Path | None) -> int:
    """Print the observations of a soak test. Returns the exit status."""
    slow = {when: statistics.quantiles(times, n=100)[98] for when, times in soak.times.items() if len(times) > 1}
    settled = [(minute, size) for minute, size in soak.gateway if minute * 60 >= SETTLED_SECONDS]
    growth = statistics.linear_regression(*zip(*settled, strict=True)).slope if len(settled) > 2 else None
    if len(slow) == 2 and slow["burst"] > 2 * slow["calm"]:
        soak.wrong.append(f"p99 of accepted requests: {slow['burst']:.2f} s in bursts, {slow['calm']:.2f} s else")
    if growth is None or growth > MOST_GROWTH:
        soak.wrong.append(
            "too short for a look at memory" if growth is None else f"the gateway grows by {growth:.2f} MB a minute"
        )
    if len(soak.gateway_pids) != 1:
        soak.wrong.append(f"{len(soak.gateway_pids)} gateway processes, one after another")
    figures = {
        "requests": dict(soak.statuses),
        "p99_seconds": slow,
        "recovery_seconds": soak.pauses,
        "gateway_mb": [soak.gateway[0][1], soak.gateway[-1][1]] if soak.gateway else [],
        "gateway_growth_mb_per_minute": growth,
        "wrong": soak.wrong,
    }
    print(json.dumps(figures, indent=1, ensure_ascii=False))
    if path is not None:
        path.write_text(json.dumps(figures))
    return bool(soak.wrong)


if __name__ == "__main__":
    raise SystemExit(main())
