"""Half of a mixture's experts in memory, all in a file: decoding beside what the disk allows.

    python tools/random_checkpoint.py --shape qwen3-moe --dtype bfloat16 DIR
    python benchmarks/expert_offload.py --model DIR --quantization int4

W1 of ``workloads.py`` with all experts in memory and with half, in turn; figures are medians. The bound is the longer of the
run in memory and of reading as many bytes at the disk's rate: that of reading as large parts of a file here and there, with the
best number of reads under way. Neither goes through the system's page cache.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from launched import launched
from workloads import BLOCKS, CONTEXT, draw_workloads

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.native import compiler
from labinfer.observe.table import format_table

GIB = 1 << 30
NUM_PARTS, DEPTHS = 256, (1, 4, 16)
"""Parts of the file that the disk's rate is measured with, and numbers of reads that are under way at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--part", type=float, default=0.5, help="of the experts that are in memory")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    base = {
        "model": args.model,
        "quantization": args.quantization,
        "max_model_len": CONTEXT,
        "num_kv_blocks": BLOCKS,
        "enable_prefix_caching": False,
    }
    with launched({"memory": base}) as llms:
        (whole,) = llms.values()
        meta = whole.layout.meta(whole.place)
        calls = [call for call in meta.calls if call.target == "experts"]
        expert_bytes = meta.expert_bytes // sum(call.num_experts * meta.calls[call] for call in calls)
        options = EngineOptions.from_flat(base | {"expert_offload": meta.expert_bytes * args.part / GIB})
        half = LLM.from_options(whole.group, options)
        rows = [measure(whole, half, expert_bytes) for _ in range(args.rounds + 1)][1:]
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    header = (
        "in memory, s",
        "read, MB",
        "disk, MB/s",
        "reading alone, s",
        "offloaded, s",
        "stalled, s",
        "hits %",
        "of the bound",
    )
    print(format_table(header, [tuple(f"{value:.2f}" for value in medians)]))


def measure(whole: LLM, half: LLM, expert_bytes: int) -> tuple[float, ...]:
    """One row of the table: a run of each, and the disk alone."""
    in_memory, offloaded = decode_seconds(whole), decode_seconds(half)
    reads, rate = half.report.workers[0].expert_reads, disk_rate(expert_bytes)
    alone = reads.bytes_read / rate
    hits = 100 * reads.hits / (reads.hits + reads.misses)
    bound = max(in_memory, alone) / offloaded
    return in_memory, reads.bytes_read / 1e6, rate / 1e6, alone, offloaded, reads.stall_time, hits, bound


def decode_seconds(llm: LLM) -> float:
    work = draw_workloads()["W1"]
    llm.generate(work.prompts, [SamplingParams(max_tokens=out, ignore_eos=True) for out in work.output_lens])
    return llm.report.wall_time


def disk_rate(size: int) -> float:
    """Bytes a second that are read from the disk under the cache folder, so many here and so many there."""
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    with tempfile.NamedTemporaryFile(dir=compiler.default_cache(), buffering=0) as file:
        for _ in range(NUM_PARTS):
            file.write(os.urandom(size))
        os.fsync(file.fileno())
        direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        try:
            return max(_read_rate(direct, size, depth) for depth in DEPTHS)
        finally:
            os.close(direct)


def _read_rate(file: int, size: int, depth: int) -> float:
    order = random.Random(depth).sample(range(NUM_PARTS), NUM_PARTS)

    def read(numbers: list[int]) -> None:
        buffer = mmap.mmap(-1, size)  # begins with a page, as such reads want it
        for number in numbers:
            assert os.preadv(file, [buffer], number * size) == size

    begin = time.perf_counter()
    with ThreadPoolExecutor(depth) as readers:
        list(readers.map(read, (order[first::depth] for first in range(depth))))
    return NUM_PARTS * size / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
