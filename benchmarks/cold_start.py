"""Time of a start, from the process's first moment to the first token, beside the time to read the weights' bytes.

    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 DIR
    python benchmarks/cold_start.py --model DIR

``anew``: weights are packed at every start (``--weight-cache-size 0``); ``kept``: they are mapped as an earlier start has packed them.
Python is let keep its bytecode, whatever ``PYTHONDONTWRITEBYTECODE`` says: without it every start compiles all of LABInfer's modules.

``dropped``: the checkpoint's files and those of packed weights are dropped from the system's cache before every start and every reading; ``cached``: they
are read once before. Programs and libraries stay cached in both. The breakdown of a start is taken from the times of its lines
on standard error with ``--log-level debug``, in one more start of each kind.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from labinfer.observe.table import format_table
from labinfer.weights.model_files import open_model
from labinfer.weights.weight_cache import WeightCache

LAUNCH = Path(__file__).parent.parent / "launch.py"
PIECE = 16 << 20
ANEW = ("--weight-cache-size", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launcher", default="", help='such as "mpirun -n 2"')
    args, flags = parser.parse_known_args()  # the rest goes to launch.py
    files = open_model(Path(args.model)).weight_files()
    command = [
        *args.launcher.split(),
        sys.executable,
        str(LAUNCH),
        "--model",
        args.model,
        "--log-level",
        "info",
        *flags,
    ]

    start(command)  # functions are compiled and chosen, and packed weights are kept
    rows, lines = [], []
    for name, prepare in (("cached", read), ("dropped", drop)):
        starts: dict[str, list[tuple[float, float]]] = {"anew": [], "kept": []}
        readings = []
        for _ in range(args.rounds):
            prepare(files)
            readings.append(read(files))
            for kind, times in starts.items():
                prepare([*files, *packed_files()])
                noted, whole = start([*command, *ANEW] if kind == "anew" else command)
                times.append((noted[-1][0], whole))
        for kind, times in starts.items():
            first, whole = (statistics.median(column) for column in zip(*times, strict=True))
            reading = statistics.median(readings)
            rows.append((name, kind, f"{first:.2f}", f"{whole:.2f}", f"{reading:.2f}", f"{first / reading:.2f}"))
            prepare([*files, *packed_files()])
            own = ANEW if kind == "anew" else ()
            lines += [f"\n{name}, {kind}:", *breakdown(start([*command, *own, "--log-level", "debug"])[0])]
    total = sum(path.stat().st_size for path in files)
    print(f"{total / 1e9:.2f} GB; medians of {args.rounds}\n")
    header = ("files", "weights", "to first token, s", "whole process, s", "to read the bytes, s", "ratio")
    print(format_table(header, rows))
    print(*lines, sep="\n")


def packed_files() -> list[Path]:
    """Files of packed weights that are kept."""
    cache = WeightCache.from_home(1)
    return [file.path for file in cache.files()] if cache is not None else []


def drop(files: list[Path]) -> None:
    """Drop files from the system's cache."""
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # dirty pages would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> float:
    """Seconds to read files from beginning to end."""
    buffer, begin = bytearray(PIECE), time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


def start(command: list[str]) -> tuple[list[tuple[float, str]], float]:
    """Run a prompt for a token.

    Returns:
        The lines on standard error, each with its second, of which the last is the first token's; and the seconds of the process.

    Raises:
        RuntimeError: the run failed.
    """
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--raw", "--prompt", "Hello", "--max-tokens", "1", "--ignore-eos"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines, requested = [], False
    for line in process.stderr:
        lines.append((time.perf_counter() - begin, line.strip()))
        if line.startswith("requests "):  # the report begins when the token is out
            requested = True
            break
    process.communicate()
    if process.returncode or not requested:
        raise RuntimeError("\n".join(text for _, text in lines))
    whole = time.perf_counter() - begin
    noted = [(second, text) for second, text in lines if text.startswith("labinfer: ")]
    return [*noted, (lines[-1][0], "first token")], whole


def breakdown(lines: list[tuple[float, str]]) -> list[str]:
    """Milliseconds from each line to the next."""
    taken, before = [], 0.0
    for second, text in lines:
        taken.append(f"{1e3 * (second - before):8.0f} ms  {text.removeprefix('labinfer: '):.100}")
        before = second
    return taken


if __name__ == "__main__":
    main()
