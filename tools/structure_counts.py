"""Count what tells whether the structure of labinfer/ can be read: lines, packages, circles, the core, duplicates.

    python tools/structure_counts.py [--option block_size] [--list]

``--list`` also names the files and places that are counted.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "labinfer"
ORDER = (
    *("cli", "server", "api", "launch", "planner", "requests", "text", "engine"),
    *("worker", "models", "functions", "comm", "weights", "native", "observe", "base"),
)
"""Order of the packages: each imports only those further right."""
CORE = {
    "engine": ("engine/*.py",),
    "worker": ("worker/*.py", "worker/logits_processors/*.py"),
    "models and layers": ("models/*.py", "models/layers/*.py"),
    "functions: interface and reference": ("functions/*.py", "functions/reference/*.py"),
    "comm": ("comm/*.py", "comm/spmd/topology.py"),
    "plain weights": ("weights/*.py", *(f"weights/formats/{name}.py" for name in ("format", "plain"))),
    "options and plans": ("base/*.py",),
}
"""The core: files that a student of scheduling, models and kernels reads, but for those of ``EXTENSIONS``."""
EXTENSIONS = {
    "model families": ("models/families/*.py",),
    "layers of families": (
        *(
            "models/families/layers/*.py",
            "functions/family_protocols.py",
            "functions/delta_*.py",
            "functions/latent_*.py",
            "functions/mamba_*.py",
        ),
        *("functions/*expert*.py", "functions/clamped_gate.py", "functions/routing_rule.py"),
        *(
            f"functions/reference/{name}.py"
            for name in ("provider", "delta_rule", "experts", "latent_attention", "mamba", "route")
        ),
    ),
    "quantized weights": (
        "weights/formats/*.py",
        "functions/reference/packed12.py",
        "functions/reference/quantized.py",
    ),
    "Hugging Face directories": ("weights/hugging_face/*.py",),
    "GGUF": ("weights/gguf/*.py", "weights/gguf/families/*.py"),
    "classification": ("base/score_head.py", "models/score_head.py", "models/layers/score_head.py"),
    "weights on disk": tuple(
        f"weights/{name}.py" for name in ("packed_file", "weight_cache", "identity", "read_ahead", "resolve", "hubs")
    ),
    "devices": ("functions/device.py",),
    "reproducible sums": (
        *("models/layers/segments.py", "models/layers/segmented_linear.py"),
        "functions/segmented_weight.py",
    ),
    "captured steps": ("worker/step_graphs.py", "functions/graph.py", "functions/waits.py"),
    "speculation": (
        *("engine/*draft*.py", "engine/*proposer*.py", "engine/round_overheads.py"),
        "worker/mtp_drafter.py",
    ),
    "beam search": ("engine/beam_*.py",),
    "assembly of an engine": ("engine/assemble.py",),
    "expert offload": ("functions/expert_offload.py",),
    "core sharing": ("launch/core_sharing.py",),
    "messages in shared memory": ("comm/shared_memory_ring.py",),
    "measuring": (
        *(f"functions/{name}.py" for name in ("autotune", "roofline_limits", "rank_calls")),
        *("comm/links.py", "worker/stats_reporter.py", "observe/*.py"),
    ),
    "transports": tuple(
        f"comm/{name}.py" for name in ("local", "mpi", "torch_dist", "routed", "shared_memory", "segment", "polling")
    ),
    "health channel": ("comm/health_*.py", "comm/rendezvous.py", "comm/listening.py", "base/heartbeat.py"),
    "launching ranks": ("comm/group/*.py", "comm/spmd/*.py"),
    "plugins": (
        "base/plugins.py",
        *(f"functions/{name}.py" for name in ("trial", "trial_results", "protocol_calls", "capture_trial", "drop")),
    ),
    "copies of accelerators": ("worker/accelerator_copies.py",),
    "thinking budgets": ("worker/logits_processors/thinking_budget.py",),
    "penalties": ("worker/logits_processors/penalties.py",),
    "terminal": ("base/standard_error.py", "base/sampling_options.py", "base/other_engines.py"),
}
"""Files that such a reader skips, by what they are for. The core imports none of them: parts come through the registry, or
``launch`` and ``engine/assemble.py`` give them to constructors. ``tests/unit/test_imports.py`` enforces it."""
CORE_FILES = ("comm/spmd/topology.py", *(f"weights/formats/{name}.py" for name in ("format", "plain")))
"""Files of the core in folders of extensions."""
MAX_CORE_LINES = 14_000
LONG_FILE, LONG_RUN, COMMON = 400, 6, 8
"""Lines of a long file; lines that a duplicated run has at least; places beyond which a run is too common to count."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def short(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def matches(path: Path, patterns: Iterable[str]) -> bool:
    return any(path.match(f"{PACKAGE.name}/{pattern}") for pattern in patterns)


def num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def import_graph(files: list[Path]) -> dict[Path, set[Path]]:
    """Files that a file imports, also for types only and inside of functions."""
    by_module = {".".join(("labinfer", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in files}
    graph: dict[Path, set[Path]] = {}
    for path in files:
        names = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        graph[path] = {by_module[name] for name in names & by_module.keys()} - {path}
    return graph


def in_circles(graph: dict[Path, set[Path]]) -> list[Path]:
    """Files that lead back to themselves."""

    def reached(start: Path) -> set[Path]:
        seen, ahead = set(), [start]
        while ahead:
            for other in graph[ahead.pop()] - seen:
                seen.add(other)
                ahead.append(other)
        return seen

    return [path for path in graph if path in reached(path)]


def extension(path: Path) -> str:
    """Name of the extension that a file belongs to; empty for the core and for neither."""
    if matches(path, CORE_FILES):
        return ""
    return next((name for name, patterns in EXTENSIONS.items() if matches(path, patterns)), "")


def core_files(files: list[Path]) -> list[Path]:
    patterns = [pattern for own in CORE.values() for pattern in own]
    return [path for path in files if matches(path, patterns) and not extension(path)]


def core_arrows(files: list[Path]) -> dict[str, list[str]]:
    """Imports by the core of what is not in it, by the extension that is imported. ``native`` is compiled code of either."""
    graph, core = import_graph(files), core_files(files)
    used = defaultdict(list)
    for path in core:
        for other in sorted(graph[path] - {*core}):
            if short(other).split("/")[0] != "native":
                used[extension(other) or "parts outside the core"].append(f"{short(path)} → {short(other)}")
    return used


def duplicated_places(files: list[Path]) -> list[str]:
    """Places of which six or more consecutive lines of code stand elsewhere, too. Blank lines, comments, imports and lone brackets
    are passed over; names and values must be the same."""
    lines = {path: [*code_lines(path)] for path in files}
    runs = defaultdict(list)
    for path, numbered in lines.items():
        for at in range(len(numbered) - LONG_RUN + 1):
            runs[tuple(text for _, text in numbered[at : at + LONG_RUN])].append((path, at))
    shared = {place for places in runs.values() if 1 < len(places) <= COMMON for place in places}
    return [f"{short(path)}:{lines[path][at][0]}" for path, at in sorted(shared) if (path, at - 1) not in shared]


def code_lines(path: Path) -> Iterator[tuple[int, str]]:
    imports = {
        number
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for number in range(node.lineno, node.end_lineno + 1)
    }
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if number not in imports and not text.startswith("#") and any(map(str.isalnum, text)):
            yield number, text


def option_places(files: list[Path], option: str) -> list[str]:
    """Functions and classes that an option passes: those that name it as a field, parameter, keyword argument, or attribute of
    something else than ``self``. The planner, its simulator and benchmarks are left out: no option goes through them to a rank."""

    def visit(path: Path, node: ast.AST, scope: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            names = (
                getattr(child, "arg", ""),
                getattr(child, "attr", ""),
                getattr(getattr(child, "target", None), "id", ""),
            )
            is_own = isinstance(child, ast.Attribute) and ast.unparse(child.value) == "self"
            if option in names and not is_own:
                yield f"{short(path)}:{scope or 'top'}"
            is_scope = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            yield from visit(path, child, f"{scope}.{child.name}".strip(".") if is_scope else scope)

    on_the_way = (path for path in files if not short(path).startswith(("planner/", "cli/bench/")))
    return sorted({place for path in on_the_way for place in visit(path, tree(path), "")})


def main() -> None:
    """Print each count on a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--option", default="block_size", help="field of an option whose way to a rank is counted")
    parser.add_argument("--list", action="store_true", help="name the files and places that are counted")
    args = parser.parse_args()
    files = sorted(PACKAGE.rglob("*.py"))
    graph = import_graph(files)

    def show(label: str, count: int, places: Iterable[str] = ()) -> None:
        print(f"{count:>8,}  {label}")
        if args.list:
            print(*(f"          {place}" for place in places), sep="\n")

    packages = [path.parent.name for path in files if path.name == "__init__.py" and path.parent.parent == PACKAGE]
    loose = [path for path in files if path.parent == PACKAGE and path.name not in ("__init__.py", "__main__.py")]
    upward = [
        f"{short(path)} → {short(other)}"
        for path, others in graph.items()
        for other in others
        if path.parent != PACKAGE and ORDER.index(short(other).split("/")[0]) < ORDER.index(short(path).split("/")[0])
    ]
    long = [path for path in files if num_lines([path]) > LONG_FILE]
    show("lines of Python", num_lines(files))
    show("packages", len(packages), packages)
    show("loose files", len(loose), map(short, loose))
    show("files in circles of imports", len(circle := in_circles(graph)), map(short, circle))
    show("imports upwards", len(upward), upward)
    show(f"files over {LONG_FILE} lines", len(long), map(short, long))
    duplicates = duplicated_places(files)
    show(f"places that share {LONG_RUN} or more lines with another", len(duplicates), duplicates)
    build = PACKAGE / "launch/build.py"
    functions = (node for node in tree(build).body if isinstance(node, ast.FunctionDef))
    built = (f.end_lineno - f.lineno + 1 for f in functions if f.name in ("build_rank", "build_placed"))
    show("lines of build_rank and build_placed", sum(built))
    places = option_places(files, args.option)
    num_files = len({place.partition(":")[0] for place in places})
    show(f"places that the option {args.option} passes, in {num_files} files", len(places), places)
    core = core_files(files)
    show("lines of the core", num_lines(core))
    for label, patterns in CORE.items():
        mine = [path for path in core if matches(path, patterns)]
        show(f"  {label}", num_lines(mine), map(short, mine))
    used = core_arrows(files)
    show("imports of extensions by the core", sum(map(len, used.values())))
    for name, arrows in sorted(used.items()):
        show(f"  {name}", len(arrows), arrows)


if __name__ == "__main__":
    main()
