"""Peak memory of each rank of a real run, beside its weights and its KV cache.

    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 DIR
    python benchmarks/peak_memory.py --model DIR
    mpirun -n 2 python benchmarks/peak_memory.py --model DIR --tensor-parallel-size 2

``peak`` is the kernel's VmHWM, which counts pages of mapped files (libraries, mostly), ``now`` the resident memory at the end
by kind. ``over`` is the peak without weights and KV cache; the goal is 400 MB. Requests fill the whole KV cache, as a page
that was never touched is not resident.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import msgspec
from launched import launched

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.observe.table import format_table

BLOCKS, CONTEXT, OUTPUT = 128, 512, 16
GOAL = 400e6
HEADER = ("rank", "stage", "tp", "weights", "KV", "peak", "over", "goal", "now: private", "shared", "files")


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a rank, in bytes."""

    stage: int
    tp_rank: int
    weights: int
    kv: int
    peak: int
    private: int
    shared: int
    files: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    with launched({"run": vars(args) | {"max_model_len": CONTEXT, "num_kv_blocks": BLOCKS}}) as llms:
        llm = llms["run"]
        num_seqs = BLOCKS * llm.options.cache.block_size // CONTEXT
        draw = random.Random(0)
        prompts = [[draw.randrange(10, 4000) for _ in range(CONTEXT - OUTPUT)] for _ in range(num_seqs)]
        llm.generate(prompts, SamplingParams(max_tokens=OUTPUT, ignore_eos=True))
        mine = msgspec.msgpack.encode(measure(llm))
        ranks = [msgspec.msgpack.decode(data, type=RankMemory) for data in llm.group.comm.all_gather_bytes(mine)]
        if llm.is_rank0:
            print(format_table(HEADER, [row(number, memory) for number, memory in enumerate(ranks)]))
            print("\nMB of a million bytes")


def measure(llm: LLM) -> RankMemory:
    """This rank's figures, from ``/proc/self/status`` (proc(5))."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    layout, place = llm.layout, llm.place
    kv = llm.spec.num_blocks * layout.block_bytes(place)
    resident = [int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon", "RssShmem", "RssFile")]
    weights = layout.meta(place).weight_bytes
    peak, private, shared, files = resident
    return RankMemory(
        stage=place.stage,
        tp_rank=place.tp_rank,
        weights=weights,
        kv=kv,
        peak=peak,
        private=private,
        shared=shared,
        files=files,
    )


def row(rank: int, memory: RankMemory) -> tuple[object, ...]:
    """A row of the table."""
    over = memory.peak - memory.weights - memory.kv
    figures = (memory.weights, memory.kv, memory.peak, over)
    verdict = "held" if over <= GOAL else "missed"
    now = (memory.private, memory.shared, memory.files)
    return (rank, memory.stage, memory.tp_rank, *map(_megabytes, figures), verdict, *map(_megabytes, now))


def _megabytes(count: int) -> int:
    return round(count / 1e6)


if __name__ == "__main__":
    main()
