"""House style that a machine can hold: names, how docstrings begin, and what may be given by position."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("labinfer", "benchmarks", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ".envs" not in path.parts
]
RIDDLES = re.compile(r"(Of|What|Who|Whose|Where|How|That|Those|These|It|Its|They)\b")
"""First words of a docstring that needs the line above it to be understood."""
VAGUE = {"held", "wanted", "found", "one"}
MOST_BY_POSITION = 5
"""Fields of a struct, and arguments of a call, that may be given without their names."""
BARE_LOGS = {
    "sys.stderr",
    "sys.__stderr__",
    "logging.StreamHandler",
    "logging.lastResort",
    "faulthandler.enable",
    "os.write(2)",
    "os.write(STANDARD_ERROR)",
    "print(file)",
}
"""Ways to standard error, or to any stream, that raise where nothing can be written."""
RECORDS = ("Struct", "NamedTuple", "dataclass", "dataclasses.dataclass")


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if re.search(r"(^|_)of(_|$)", node.name):
                yield node.lineno, f"{node.name}: name what it returns, as a noun"
        elif isinstance(node, ast.ClassDef) and re.match(r"_?Of[A-Z]", node.name):
            yield node.lineno, f"{node.name}: name it by a noun"
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, f"{node.arg}: name what it is"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.lineno, f"{node.id}: name what it is"


def riddles(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and the strings under constants and fields."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, (ast.Lambda, ast.IfExp)) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str) and RIDDLES.match(text.lstrip()):
                    yield statement.lineno, f"{text.splitlines()[0]!r}: begin with a noun or a verb"


def wide_records(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item)]
        calls = [decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
        sources = [*node.decorator_list, *(call.func for call in calls), *node.bases]
        is_record = any(ast.unparse(source).endswith(RECORDS) for source in sources)
        keywords = [*node.keywords, *(keyword for call in calls for keyword in call.keywords)]
        keyword_only = any(keyword.arg == "kw_only" for keyword in keywords)
        if is_record and len(fields) > MOST_BY_POSITION and not keyword_only:
            yield node.lineno, f"{node.name} has {len(fields)} fields: make it kw_only"


def wide_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args]
            count = len(arguments) - (bool(arguments) and arguments[0].arg in ("self", "cls"))
            is_kernel = any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
            if count > MOST_BY_POSITION and not is_kernel:  # Triton compiles no function with a *
                yield node.lineno, f"{node.name} takes {count} arguments by position: put a * before the last of them"


def bare_logs(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Writes to standard error that fail where it cannot be written, and so may end a run."""
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "os.write" and node.args:
            text = f"os.write({ast.unparse(node.args[0])})"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            text = "print(file)" if any(keyword.arg == "file" for keyword in node.keywords) else ""
        if text in BARE_LOGS:
            yield node.lineno, f"{text}: use labinfer.base.standard_error, whose writes never fail"


RULES = (vague_names, riddles, wide_records, wide_calls, bare_logs)
EXEMPT = {
    bare_logs: {
        "labinfer/base/standard_error.py",  # the writer itself
        "labinfer/server/supervisor/child.py",  # runs without the package, and suppresses errors
    }
}
"""Files that a rule does not hold for. Benchmarks and tools write where they like."""


def breaches(paths: Iterable[Path]) -> dict[Callable, list[str]]:
    """Lines that break each rule. Each file is parsed once: that takes longer than the rules."""
    lines: dict[Callable, list[str]] = {rule: [] for rule in RULES}
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for rule in RULES:
            is_exempt = rule in EXEMPT and (path.is_relative_to(ROOT) and not _is_checked(path, EXEMPT[rule]))
            lines[rule] += [] if is_exempt else [f"{path}:{line}: {text}" for line, text in rule(tree)]
    return lines


def _is_checked(path: Path, exempt: set[str]) -> bool:
    name = path.relative_to(ROOT).as_posix()
    return name.startswith("labinfer/") and name not in exempt


@pytest.fixture(scope="module")
def breaches_by_rule() -> dict[Callable, list[str]]:
    return breaches(FILES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_to_the_rule(breaches_by_rule, rule: Callable):
    assert len(FILES) > 50  # the reading itself works
    assert not breaches_by_rule[rule], "\n".join(breaches_by_rule[rule])


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (vague_names, "def tracks_of(workers): ..."),
        (vague_names, "def _of_linear(workers): ..."),
        (vague_names, "class OfModel: ..."),
        (vague_names, "def check(wanted): ..."),
        (vague_names, "for one in range(3): ..."),
        (riddles, '"""What a run shows."""'),
        (riddles, 'LIMIT = 3\n"""Of its address space."""'),
        (riddles, 'class Place:\n    """Where a rank stands."""'),
        (wide_records, "@dataclass\nclass A:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n    f: int"),
        (
            wide_records,
            "class A(msgspec.Struct):\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n    f: int",
        ),
        (wide_calls, "class A:\n    def f(self, a, b, c, d, e, f): ..."),
        (bare_logs, "sys.stderr.write(text)"),
        (bare_logs, "print(text, file=stream)"),
        (bare_logs, "os.write(STANDARD_ERROR, data)"),
        (bare_logs, "handler = logging.StreamHandler()"),
        (bare_logs, "faulthandler.enable()"),
    ],
)
def test_breach_of_a_rule_is_seen(rule: Callable, source: str):
    assert len(list(rule(ast.parse(source)))) == 1


def test_good_style_passes_every_rule():
    source = '''
"""Tables of a finished run."""
class Row(msgspec.Struct, kw_only=True):
    """Counts of one rank."""
    a: int
    b: int
    c: int
    d: int
    e: int
    f: int
def office(self, a, b, c, d, e, *, f): ...
'''
    for rule in RULES:
        assert not list(rule(ast.parse(source)))


if __name__ == "__main__":
    for given in map(Path, sys.argv[1:] or ["labinfer"]):
        by_rule = breaches(sorted(given.rglob("*.py")) if given.is_dir() else [given])
        print(*(line for lines in by_rule.values() for line in lines), sep="\n")
