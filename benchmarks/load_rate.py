"""Rate of loading a checkpoint beside that of ``cat``, and the memory that it takes beside each rank's own share.

    python tools/random_checkpoint.py --shape qwen3-moe --dtype bfloat16 DIR
    python benchmarks/load_rate.py --model DIR
    mpirun -n 2 python benchmarks/load_rate.py --model DIR --tensor-parallel-size 2 --quantization int4

Each round drops the files from the system's cache and reads them with ``cat``, drops them again and loads the model; then the same
with all files in the cache. Loading is from the moment that a start begins to read ahead to the last tensor, decoded and packed,
without the import of torch. Ratios are taken within a round. ``over`` is what the peak of a rank's memory in this time was
above the memory before it and its share of the weights.
"""

from __future__ import annotations

import argparse
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
            taken = 0.0
            if group.rank == 0:
                prepare(files)
                begin = time.perf_counter()
                subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
                taken = time.perf_counter() - begin
                prepare(files)
            group.comm.all_gather_bytes(b"")  # the others wait until the files are as they are to be
            own = msgspec.msgpack.encode(LoadClock().load(group, options))
            ranks = [msgspec.msgpack.decode(data, type=Loading) for data in group.comm.all_gather_bytes(own)]
            loading = max(rank.end for rank in ranks) - min(rank.begin for rank in ranks)
            rounds.append({"cat": taken, "loading": loading, "rate": taken / loading})
            over, share = max(over, *(rank.over for rank in ranks)), max(rank.share for rank in ranks)
        figures = medians(rounds)
        rows.append((name, f"{figures['cat']:.2f}", f"{figures['loading']:.2f}", f"{figures['rate']:.2f}"))
    if group.rank == 0:
        total = sum(path.stat().st_size for path in files)
        print(f"{total / 1e9:.2f} GB on disk, {share / 1e9:.2f} GB of weights a rank; medians of {args.rounds}\n")
        print(format_table(("files", "cat, s", "loading, s", "rate of cat's"), rows))
        print(f"\nover: {over / 1e6:.0f} MB at most")
    group.close()


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
