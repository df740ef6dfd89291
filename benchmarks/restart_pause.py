"""The pause of open streams when a rank is killed under ``launch.py supervise``, and where it goes.

    python benchmarks/restart_pause.py --model demo --dtype float32 --limit 3
    python benchmarks/restart_pause.py --model .qwen2-0.5b --limit 6

Sixteen greedy streams run, and a rank is killed by SIGKILL: rank 1 and rank 0 by turns, each time on a new server, as a second
death within ten minutes is followed by a pause of the supervisor's. Seconds from the death until the supervisor has started
the ranks again, until the gateway is ready, until the first token, and the longest time in which a stream got nothing.
Exit status 1 where that is above ``--limit``, a stream ends in an error, or, with ``--dtype float32``, its text is another than undisturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import time

import httpx
from process_tree import is_rank, processes, rank_number
from served import LAUNCHERS, Served, serving

STREAMS = 16
LOOK_SECONDS = 0.01
BEGUN_PIECES = 20
"""Pieces that each stream has got when the rank is killed."""
TIMEOUT = 300.0
STAGES = ("started again", "ready", "first token", "longest pause")
"""Seconds from the death to each; the last is the longest time in which a stream got nothing."""
WORDS = "the sea and the sky were as blue as the eyes of a small cat"
"""Text whose tokens are all that streams say. Each of them is a piece of the answer, and none an end; most of the others of a random
checkpoint have no text, and would look like pauses."""


class Stream:
    """One request, and the times at which pieces of its answer came.

    Args:
        allowed: ids of the tokens that it may say.
    """

    def __init__(self, number: int, tokens: int, allowed: list[int]):
        self.body = {
            "prompt": f"Once upon a time, {number + 2} ",
            "max_tokens": tokens,
            "allowed_token_ids": allowed,
            "temperature": 0,
            "stream": True,
        }
        self.text, self.error, self.times = "", "", []

    async def run(self, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=self.body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                self.error = self.error or str(event.get("error", ""))
                self.times.append(time.monotonic())
                self.text += "".join(choice["text"] for choice in event.get("choices", ()))

    def longest_gap(self, since: float) -> float:
        """Seconds without a piece, of those gaps that end after ``since``."""
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False) if after > since]
        return max(gaps, default=float("inf"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--launcher", choices=[name for name in LAUNCHERS if name != "alone"], default="mpirun")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--deaths", type=int, default=6)
    parser.add_argument("--limit", type=float, help="seconds of the longest pause that is allowed")
    args = parser.parse_args()
    rows, wrong, undisturbed = [], [], None
    for death in range(args.deaths):
        rank = 1 - death % 2
        with serving(args.launcher, args.model, "--dtype", args.dtype, supervised=True) as server:
            if undisturbed is None:
                undisturbed = asyncio.run(undisturbed_streams(server, args.tokens))
                gap = max(stream.longest_gap(0.0) for stream in undisturbed)
                print(f"undisturbed, the longest time in which a stream got nothing: {gap:.2f} s", flush=True)
            row, streams = asyncio.run(one_death(server, args.tokens, rank))
        rows.append(row)
        print(f"rank {rank} killed: " + ", ".join(f"{name} {row[name]:.2f} s" for name in STAGES), flush=True)
        wrong += [stream.error for stream in streams if stream.error]
        if differ := sum(a.text != b.text for a, b in zip(streams, undisturbed, strict=True)):
            print(f"{differ} of {STREAMS} streams have another text than undisturbed")
            wrong += ["another text"] * (differ if args.dtype == "float32" else 0)
    print("| from the death to | median s | longest s |\n|---|---|---|")
    for name in STAGES:
        values = [row[name] for row in rows]
        print(f"| {name} | {statistics.median(values):.2f} | {max(values):.2f} |")
    longest = max(row["longest pause"] for row in rows)
    if args.limit is not None and longest > args.limit:
        wrong.append(f"a pause of {longest:.2f} s")
    print("; ".join(wrong) or "no stream saw an error")
    return bool(wrong)


async def make_streams(client: httpx.AsyncClient, tokens: int) -> list[Stream]:
    answer = await client.post("/tokenize", json={"prompt": WORDS, "add_special_tokens": False})
    return [Stream(number, tokens, sorted(set(answer.json()["tokens"]))) for number in range(STREAMS)]


async def undisturbed_streams(server: Served, tokens: int) -> list[Stream]:
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
        streams = await make_streams(client, tokens)
        await asyncio.gather(*(stream.run(client) for stream in streams))
    return streams


async def one_death(server: Served, tokens: int, rank: int) -> tuple[dict[str, float], list[Stream]]:
    """Kill a rank in the middle of the streams; seconds from there to each stage, and the streams, ended."""
    row = {}
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
        streams = await make_streams(client, tokens)
        tasks = [asyncio.create_task(stream.run(client)) for stream in streams]
        while not all(len(stream.times) >= BEGUN_PIECES for stream in streams):
            await asyncio.sleep(LOOK_SECONDS)
        before = processes(server.pid, is_rank)
        begin = time.monotonic()
        os.kill(next(pid for pid in before if rank_number(pid) == rank), signal.SIGKILL)
        while not any(rank_number(pid) >= 0 and pid not in before for pid in processes(server.pid, is_rank)):
            await asyncio.sleep(LOOK_SECONDS)
        row["started again"] = time.monotonic() - begin
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(LOOK_SECONDS)
        row["ready"] = time.monotonic() - begin
        await asyncio.gather(*tasks)
    times = [when - begin for stream in streams for when in stream.times]
    row["first token"] = min((when for when in times if when > row["started again"]), default=float("inf"))
    row["longest pause"] = max(stream.longest_gap(begin) for stream in streams)
    return row, streams


if __name__ == "__main__":
    raise SystemExit(main())
