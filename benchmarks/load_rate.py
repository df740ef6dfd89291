"""Rate of loading a checkpoint beside that of ``cat``, and the memory that it takes beside each rank's own share.

    python tools/random_checkpoint.py --shape qwen3-moe --dtype bfloat16 DIR
    python benchmarks/load_rate.py --model DIR
    mpirun -n 2 python benchmarks/load_rate.py --model DIR --tensor-parallel-size 2 --quantization int4

Each round reads the files with direct I/O, drops them from the system's cache and reads them with ``cat``, drops them again and loads
the model; then the same with all files in the cache. Loading is from the moment that a start begins to read ahead to the last tensor, decoded and packed,
without the import of torch. Ratios are taken within a round. ``over`` is what the peak of a rank's memory in this time was
above the memory before it and its share of the weights.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import time
from pathlib import Path

import msgspec
from cold_start import drop, read
from launched import medians

from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.comm.group.failure import end_group_on_uncaught
from labinfer.comm.group.rank_group import RankGroup, join_group
from labinfer.comm.spmd.environment import detect
from labinfer.observe.table import format_table
from labinfer.weights.model_files import open_model
from labinfer.weights.read_ahead import start_reading_ahead

BLOCKS = 64
PIECE = 4 << 20


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's loading: times of the machine's monotonic clock in seconds, memory in bytes."""

    begin: float
    end: float
    share: int
    over: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    flat = {name: value for name, value in vars(args).items() if name != "rounds"}
    # Without the cache of packed weights, from which a second start would have them.
    options = EngineOptions.from_flat(flat | {"num_kv_blocks": BLOCKS, "weight_cache_size": 0.0})
    group = join_group(detect(), options)
    end_group_on_uncaught(group)
    files = open_model(Path(args.model)).weight_files()
    LoadClock().load(group, options)  # functions are compiled and chosen
    rows, over, share = [], 0, 0
    for name, prepare in (("dropped", drop), ("cached", read)):
        rounds = []
        for _ in range(args.rounds):
            taken = direct = 0.0
            if group.rank == 0:
                direct = read_directly(files)
                prepare(files)
                begin = time.perf_counter()
                subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
                taken = time.perf_counter() - begin
                prepare(files)
            group.comm.all_gather_bytes(b"")  # the others wait until the files are as they are to be
            own = msgspec.msgpack.encode(LoadClock().load(group, options))
            ranks = [msgspec.msgpack.decode(data, type=Loading) for data in group.comm.all_gather_bytes(own)]
            loading = max(rank.end for rank in ranks) - min(rank.begin for rank in ranks)
            ratios = {"rate": taken / loading, "of disk": direct / loading}
            rounds.append({"direct": direct, "cat": taken, "loading": loading, **ratios})
            over, share = max(over, *(rank.over for rank in ranks)), max(rank.share for rank in ranks)
        figures = medians(rounds)
        rows.append((name, *(f"{value:.2f}" for value in figures.values())))
    if group.rank == 0:
        total = sum(path.stat().st_size for path in files)
        print(f"{total / 1e9:.2f} GB on disk, {share / 1e9:.2f} GB of weights a rank; medians of {args.rounds}\n")
        header = ("files", "direct I/O, s", "cat, s", "loading, s", "rate of cat's", "rate of direct I/O's")
        print(format_table(header, rows))
        print(f"\nover: {over / 1e6:.0f} MB at most")
    group.close()


def read_directly(files: list[Path]) -> float:
    """Seconds to read files past the system's cache, in one thread; NaN where the file system has no direct I/O."""
    begin = time.perf_counter()
    with mmap.mmap(-1, PIECE) as buffer:  # direct I/O needs aligned memory
        for path in files:
            try:
                file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError:
                return float("nan")
            position = 0
            while count := os.preadv(file, [buffer], position):
                position += count
            os.close(file)
    return time.perf_counter() - begin


class LoadClock:
    """Notes when a model's first and last tensor are loaded, and the memory in between."""

    def __init__(self):
        self._begin = self._end = 0.0
        self._before = self._peak = 0

    def load(self, group: RankGroup, options: EngineOptions) -> Loading:
        """Load a model on this rank, and drop it."""
        where = group.environment
        self._begin = time.monotonic()
        start_reading_ahead(options.model.model, where.model_dir, where.local_rank, where.local_world_size)
        llm = LLM.from_options(group, options, self._note)
        share = llm.layout.meta(llm.place).weight_bytes
        return Loading(begin=self._begin, end=self._end, share=share, over=self._peak - self._before - share)

    def _note(self, done: int, total: int) -> None:
        if not done:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
            self._before = _status("VmRSS")
        elif done == total:
            self._end, self._peak = time.monotonic(), _status("VmHWM")


def _status(name: str) -> int:
    """Bytes of a line of ``/proc/self/status``."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


if __name__ == "__main__":
    main()
