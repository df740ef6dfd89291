"""Cost of an idle server: processor time of every process, and the time to the first token after a pause.

    python benchmarks/idle_server.py [--model DIR] [--pause 60]

Two pipeline stages under each launcher. Percentages are of one core, over the pause. Times to the first token are of a short
request over HTTP, after a second and after the pause, taken in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import urllib.request
from pathlib import Path

from served import LAUNCHERS, Served, serving

from labinfer.observe.table import format_table

SHORT_PAUSE = 1.0
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pause", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.pause <= SHORT_PAUSE:
        parser.error(f"--pause should be longer than {SHORT_PAUSE:g} s, not {args.pause:g}")
    cpu_rows, token_rows = [], []
    for name in LAUNCHERS:
        with serving(name, args.model) as server:
            first_token(server)
            after = {SHORT_PAUSE: [], args.pause: []}
            used: dict[str, list[float]] = {}
            for _ in range(args.rounds):
                for pause, times in after.items():
                    before, begin = processor_seconds(server.pid), time.monotonic()
                    time.sleep(pause)
                    if pause == args.pause:
                        seconds = time.monotonic() - begin
                        for title, spent in processor_seconds(server.pid).items():
                            used.setdefault(title, []).append(100 * (spent - before[title]) / seconds)
                    times.append(1e3 * first_token(server))
        cpu_rows += [
            (name, title, f"{statistics.median(values):.2f}", f"{max(values):.2f}") for title, values in used.items()
        ]
        token_rows.append((name, *(f"{statistics.median(times):.1f}" for times in after.values())))
    print(format_table(("launcher", "process", "% of a core", "at most"), cpu_rows))
    print()
    print(format_table(("first token, ms", f"after {SHORT_PAUSE:g} s", f"after {args.pause:g} s"), token_rows))


def first_token(server: Served) -> float:
    """Seconds to the first text of a streamed answer, which is then read to its end."""
    request = server.completion(prompt=[5, 6, 7, 8], max_tokens=4, stream=True)
    begin = time.monotonic()
    with urllib.request.urlopen(request) as response:
        response.readline()
        seconds = time.monotonic() - begin
        response.read()
    return seconds


def processor_seconds(pid: int) -> dict[str, float]:
    """Seconds of a launcher and of every rank and the gateway below it, by a title of the process."""
    seconds, todo = {}, [pid]
    while todo:
        process = todo.pop()
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        todo += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        name = "launcher"
        if b"labinfer.server.gateway.main" in words:
            name = "gateway"
        elif (
            any(word.endswith(b"launch.py") for word in words)
            and b"python" in words[0]
            and b"torchrun" not in b" ".join(words[:3])
        ):
            name = f"rank process {sum(title.startswith('rank') for title in seconds)}"
        title = name if name not in seconds else f"{name} {process}"
        seconds[title] = (int(fields[11]) + int(fields[12])) / TICKS
    return seconds


if __name__ == "__main__":
    main()
