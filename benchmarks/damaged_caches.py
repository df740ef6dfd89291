"""Answers of starts whose caches are damaged: every answer is to be the one of an empty cache, and no start may hang or die.

    python benchmarks/damaged_caches.py --cases 1000 --seed 1

A case damages one file of the caches by a seeded generator: bits flipped, cut at one of 20 places, replaced by a neighbour (the file of
another model or quantization), by a FIFO, a directory, a symbolic link to the neighbour, an empty file or random bytes, or given to
another user (as root). A forked process then loads the bundled model and answers prompts greedily. Files that no start on one rank reads
(costs, links, plans) are read by their reader instead, which is to give the old content or none.

The compiler is replaced by the bytes that it made before, as compiling takes a minute.
"""

from __future__ import annotations

import argparse
import collections
import gc
import importlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from labinfer import LLM, SamplingParams
from labinfer.functions import autotune
from labinfer.functions.cpu import library
from labinfer.launch.known_plan import KnownPlan
from labinfer.launch.measure.cost_file import read_costs, write_costs
from labinfer.native import compiler
from labinfer.native.cache_file import read_sealed, write_sealed
from labinfer.observe.table import format_table
from labinfer.planner.cluster import MachinePairLink, NetworkLink
from labinfer.planner.costs import HostCosts, LayerCosts, Points
from labinfer.planner.saved_plan import SavedPlan, SavedStage
from labinfer.weights import packed_file

MODEL = Path(__file__).parent.parent / "labinfer" / "assets" / "demo"
PROMPTS = ("What is 17 + 25?", "Count from 3 to 12.", "Say hello.")
TIME_LIMIT = 120
"""Seconds after which a case counts as one that hangs."""
OTHER_USER = 12345
COSTS = HostCosts(
    name="a",
    model="m",
    dtype="float32",
    memory=1 << 30,
    layers=["x", "x"],
    layer_kinds={
        "x": LayerCosts(
            linear=Points([1, 64], [1e-3, 2e-3]), small=Points([], []), decode=(0, 0, 1e-7), chunk=(0, 0, 1e-8)
        )
    },
    layer_bytes={"x": 1000},
    kv_bytes={"x": 10},
    hidden_bytes=100,
    embedding_bytes=100,
    head_bytes=100,
    head=Points([1], [1e-3]),
    embed=Points([1], [1e-5]),
    fixed=1e-4,
)
STAGE = SavedStage(machine="a", layers=2, tp_size=1, dtype="float32", quantization="none")
READ: dict[str, tuple[object, object, type]] = {
    "host-": (COSTS, msgspec.structs.replace(COSTS, fixed=2e-4), HostCosts),
    "links-": (
        [MachinePairLink(a="a", b="b", link=NetworkLink(1e-4, 1e9))],
        [MachinePairLink(a="a", b="b", link=NetworkLink(2e-4, 1e9))],
        list[MachinePairLink],
    ),
    "plan-": (
        KnownPlan(SavedPlan(model="m", stages=[STAGE]), {"a": 1}),
        KnownPlan(SavedPlan(model="n", stages=[STAGE]), {"a": 1}),
        KnownPlan,
    ),
}
"""Content of the file, of its neighbour, and its kind, by the beginnings of their names."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="cases with answers (default: %(default)s)")
    parser.add_argument("--read-cases", type=int, default=300, help="cases of readers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="cases at once (default: %(default)s)")
    args = parser.parse_args()
    packed_file.LEAST_BYTES = 0
    autotune.MAX_SPREAD, autotune.SECONDS = float("inf"), 0.001
    compiled = library.build()  # in the cache of this user
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        bench = Bench(home, read_sealed(Path(compiled._name)))
        results = bench.run(args.cases, args.seed, args.jobs)
        results.update(bench.read(args.read_cases, args.seed))
    kinds = sorted({kind for kind, _, _ in results})
    outcomes = sorted({outcome for _, _, outcome in results})
    rows = []
    for kind in kinds:
        for damage in sorted({name for each, name, _ in results if each == kind}):
            rows.append((kind, damage, *(str(results[kind, damage, outcome]) for outcome in outcomes)))
    print(format_table(("file", "damage", *outcomes), rows))
    good = {outcome for outcome in outcomes if outcome in ("noticed", "harmless")}
    failed = sum(count for (_, _, outcome), count in results.items() if outcome not in good)
    print(f"{results.total()} cases, {failed} of them wrong")
    sys.exit(bool(failed))


class Bench:
    """A cache as starts leave it, and the answers of these.

    Args:
        home: an empty folder.
        compiled: content of the library of compiled functions.
    """

    def __init__(self, home: Path, compiled: bytes):
        self._home = home
        compiler._compile = lambda *_, **__: compiled  # one rank needs no other library
        self._other = home / "other-model"
        shutil.copytree(MODEL, self._other)
        weights = load_file(self._other / "model.safetensors")
        generator = torch.Generator().manual_seed(1)
        save_file(
            {
                name: each + 0.3 * each.float().std() * torch.randn(each.shape, generator=generator)
                if each.is_floating_point() and each.dim() > 1
                else each
                for name, each in weights.items()
            },
            self._other / "model.safetensors",
        )
        self._good = home / "good"
        self.expected = self._fork(self._good, MODEL)
        for name in self.expected["modules"]:  # once, not in every case
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        others = self._fork(home / "neighbours", self._other)
        if self.expected["tokens"] == others["tokens"]:
            raise SystemExit("the neighbour answers as the model does, so nothing would be noticed")
        again = self._fork(self._good, MODEL)
        if again["tokens"] != self.expected["tokens"] or again["lines"]:
            raise SystemExit(f"a start with a whole cache differs from the first: {again}, {self.expected}")
        self._targets = {self._kind(path): path.name for path in self._files(self._good)}
        self._neighbours = {self._kind(path): path for path in self._files(home / "neighbours")}
        self._neighbours["library"] = self._write_neighbour_library(compiled)

    def run(self, num_cases: int, seed: int, jobs: int) -> collections.Counter:
        """Outcomes of cases with answers, counted by kind of file and damage."""
        results: collections.Counter = collections.Counter()
        children: dict[int, tuple[int, str, str, Path, int]] = {}

        def reap() -> None:
            number, kind, damage, home, reader = children.pop(os.waitpid(-1, 0)[0])
            with open(reader, "rb") as answer:
                said = answer.read()
            outcome = self._judge(json.loads(said) if said else {"died": True})
            results[kind, damage, outcome] += 1
            if outcome not in ("noticed", "harmless"):
                print(f"case {number} of seed {seed}: {kind}, {damage}: {outcome}: {said[:500]!r}", flush=True)
            if sum(results.values()) % 100 == 0:
                print(f"{sum(results.values())} of {num_cases} cases", file=sys.stderr, flush=True)
            shutil.rmtree(home)

        for number in range(num_cases):
            if len(children) >= jobs:
                reap()
            generator = random.Random(f"{seed}-{number}")
            kind = generator.choice(sorted(self._targets))
            home = self._home / f"case-{number}"
            shutil.copytree(self._good, home, symlinks=True)
            path = next(each for each in self._files(home) if each.name == self._targets[kind])
            damage = generator.choice(sorted(DAMAGES))
            DAMAGES[damage](path, self._neighbours[kind], generator)
            pid, reader = self._start(home, MODEL)
            children[pid] = (number, kind, damage, home, reader)
        while children:
            reap()
        return results

    def read(self, num_cases: int, seed: int) -> collections.Counter:
        """Outcomes of cases of files that are only read here."""
        results: collections.Counter = collections.Counter()
        logging.getLogger("labinfer").setLevel(logging.ERROR)
        for number in range(num_cases):
            generator = random.Random(f"read-{seed}-{number}")
            prefix = generator.choice(sorted(READ))
            content, other, kind = READ[prefix]
            folder = self._home / f"read-{number}"
            path, neighbour = folder / f"{prefix}1.json", folder / f"{prefix}2.json"
            write_costs(path, content)
            write_costs(neighbour, other)
            damage = generator.choice(sorted(DAMAGES))
            DAMAGES[damage](path, neighbour, generator)
            costs = read_costs(path, kind)
            outcome = "noticed" if costs is None else "harmless" if costs == content else "WRONG"
            write_costs(path, content)
            if read_costs(path, kind) != content and damage != "directory":
                outcome = "NOT MENDED"
            results[prefix.strip("-"), damage, outcome] += 1
            shutil.rmtree(folder)
        return results

    def _judge(self, said: dict) -> str:
        if "tokens" not in said:
            return "HANGS OR DIED"
        if said["tokens"] != self.expected["tokens"]:
            return "WRONG"
        return "noticed" if said["lines"] else "harmless"

    def _fork(self, home: Path, model: Path) -> dict:
        pid, reader = self._start(home, model)
        with open(reader, "rb") as answer:
            said = json.loads(answer.read())
        os.waitpid(pid, 0)
        return said

    @staticmethod
    def _start(home: Path, model: Path) -> tuple[int, int]:
        """A process that answers with this home directory, and what reads its answer."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writer)
            return pid, reader
        try:
            os.close(reader)
            signal.alarm(TIME_LIMIT)
            Path.home = lambda: home
            lines: list[str] = []
            handler = logging.Handler(logging.WARNING)
            handler.emit = lambda record: lines.append(record.getMessage())
            logger = logging.getLogger("labinfer")
            logger.handlers[:], logger.propagate = [handler], False
            said = {"tokens": answer(model), "lines": [line for line in lines if str(home) in line]}
            said["modules"] = sorted(
                name for name in sys.modules if name.startswith(("labinfer.", "tokenizers", "jinja2"))
            )
            with open(writer, "wb") as pipe:
                pipe.write(json.dumps(said).encode())
        except BaseException:  # noqa: BLE001 - the process ends, and says why
            traceback.print_exc()
        finally:
            os._exit(0)

    @staticmethod
    def _files(home: Path) -> list[Path]:
        return sorted(path for path in (home / ".cache" / "labinfer").iterdir() if path.suffix in KINDS)

    @staticmethod
    def _kind(path: Path) -> str:
        return KINDS[path.suffix]

    def _write_neighbour_library(self, compiled: bytes) -> Path:
        """A library that was sealed under another name, whose code gives other numbers."""
        path = self._home / "neighbours" / "kernels-other.so"
        changed = bytearray(compiled)
        middle = len(changed) // 2
        changed[middle : middle + 4096] = bytes(4096)
        write_sealed(path, bytes(changed), mode=0o700)
        return path


KINDS = {".so": "library", ".weights": "packed weights", ".json": "times"}


def answer(model: Path) -> list[list[int]]:
    """Greedy tokens of the prompts; ends when packed weights are kept."""
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    with LLM(str(model), threads=1, num_kv_blocks=64, dtype="bfloat16") as llm:
        outputs = llm.generate(chats, SamplingParams(max_tokens=12, temperature=0))
    for thread in threading.enumerate():
        if thread.name == "weight-cache":
            thread.join()
    return [list(output.token_ids) for output in outputs]


def flip(path: Path, neighbour: Path, generator: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(generator.choice((1, 1, 2, 3))):
        place = generator.randrange(8 * len(data))
        data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def truncate(path: Path, neighbour: Path, generator: random.Random) -> None:
    os.truncate(path, path.stat().st_size * generator.randrange(20) // 20)


def swap(path: Path, neighbour: Path, generator: random.Random) -> None:
    shutil.copy(neighbour, path)


def empty(path: Path, neighbour: Path, generator: random.Random) -> None:
    path.write_bytes(b"")


def scramble(path: Path, neighbour: Path, generator: random.Random) -> None:
    path.write_bytes(generator.randbytes(path.stat().st_size))


def zero(path: Path, neighbour: Path, generator: random.Random) -> None:
    """As a file system may leave pages that were not on the disk when the power failed."""
    data = bytearray(path.read_bytes())
    begin = generator.randrange(len(data))
    data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
    path.write_bytes(data)


def fifo(path: Path, neighbour: Path, generator: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path, neighbour: Path, generator: random.Random) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path, neighbour: Path, generator: random.Random) -> None:
    path.unlink()
    path.symlink_to(neighbour)


def give_away(path: Path, neighbour: Path, generator: random.Random) -> None:
    os.chown(path, OTHER_USER, OTHER_USER)


def open_to_others(path: Path, neighbour: Path, generator: random.Random) -> None:
    path.chmod(0o666)


DAMAGES: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "bits flipped": flip,
    "truncated": truncate,
    "neighbour": swap,
    "empty": empty,
    "random bytes": scramble,
    "page of zeros": zero,
    "FIFO": fifo,
    "directory": directory,
    "symbolic link": link,
    "writable by all": open_to_others,
} | ({"another user's": give_away} if os.geteuid() == 0 else {})


if __name__ == "__main__":
    main()
