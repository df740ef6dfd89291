"""House style that a machine can hold: names, how docstrings begin, and what may be given by position."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("labinfer", "benchmarks", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ".envs" not in path.parts
]
GLOSSARY = ROOT / "docs" / "glossary.md"
PLAIN_NOUNS = """
address answer array bit byte character client column command connection core cpu digest directory document engine error event exception
expression file flag folder gpu hash http integer json kernel key layer line lock machine matrix memory message minute model norm object path
port program prompt queue response row scheduler schema second server signal socket string terminal text thread token url user vector weight
"""
"""Nouns that need no entry in the glossary. Nouns that name nothing by themselves (number, value, time, size) are left out on purpose."""
FILLERS = """
a all an and any are as at be by can do each every first for from had has have if in into is it its last may more most new no none not of on
one only or other out over own per same so than that the their them then there these they this those to two under until up was were what when
where which who whose with without size
"""
TYPES = "bool bytes callable dict false float int iterable iterator list mapping optional self set str true tuple"
"""Words of a signature that name no subject."""
SUFFIX = re.compile(r"(?<=[a-z]{4})(ing|ie|ied|ion|ed|e|er|or|y)$")
OVERUSED = re.compile(r"\b(what (?:it|is|the)|so many|the same|these take|likewise)\b", re.IGNORECASE)
"""Phrases that stand in place of a noun more often than not."""
MAX_OVERUSED = 79
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
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
RECORDS = ("Struct", "NamedTuple", "dataclass", "dataclasses.dataclass")


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            if re.search(r"(^|_)of(_|$)", node.name):
                yield node.lineno, f"{node.name}: name what it returns, as a noun"
        elif isinstance(node, ast.ClassDef) and re.match(r"_?Of[A-Z]", node.name):
            yield node.lineno, f"{node.name}: name it by a noun"
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, f"{node.arg}: name what it is"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.lineno, f"{node.id}: name what it is"


def riddles(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings without a name in backticks, a word of their own signature, or a term of the glossary."""
    for line, text, named in docstrings(tree):
        first, rest = (text.split(maxsplit=1) + ["", ""])[:2]
        words = stems(rest if is_verb(first, named[0]) else text)  # "Closes these" does not name the subject of close()
        if "`" not in text and not words & (stems(signature(named)) - stems(FILLERS + TYPES) | terms()):
            yield line, f"{text.splitlines()[0]!r}: name the subject, by a word of the signature or of docs/glossary.md"


def is_verb(first: str, named: ast.AST) -> bool:
    """Whether the first word of a docstring is the verb with which the name of its function begins."""
    if not isinstance(named, FUNCTIONS) or any("property" in ast.unparse(item) for item in named.decorator_list):
        return False
    return bool(stems(first) & stems(named.name.strip("_").partition("_")[0]))


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str, tuple[ast.AST, ...]]]:
    """Line and text of the docstrings of modules, classes and functions, and of the strings under constants and fields; each with
    what it describes, followed by the class around it, if any."""
    classes = {item: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in ast.walk(node)}
    for node in ast.walk(tree):
        statements = [] if isinstance(node, (ast.Lambda, ast.IfExp)) else getattr(node, "body", [])
        for above, statement in zip([node, *statements], statements, strict=False):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    around = classes.get(above)
                    yield statement.lineno, text, (above, around) if around and around is not above else (above,)


def signature(nodes: Iterable[ast.AST]) -> str:
    """Names in a signature: a module's classes and functions, the fields of a class, parameters and types of a function."""
    names: list[str] = []
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            names += [node.name, ast.unparse(node.args)]
            names += [ast.unparse(node.returns)] if node.returns else []
        elif isinstance(node, ast.ClassDef):
            constructors = (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
            fields = (ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign))
            names += [
                node.name,
                *map(ast.unparse, node.bases),
                *fields,
                *(ast.unparse(item.args) for item in constructors),
            ]
        elif isinstance(node, ast.Module):
            names += [item.name for item in node.body if isinstance(item, (ast.ClassDef, ast.FunctionDef))]
        elif isinstance(node, ast.AnnAssign):
            names += [ast.unparse(node.target), ast.unparse(node.annotation)]
        elif isinstance(node, ast.Assign):
            names += map(ast.unparse, node.targets)
    return " ".join(names)


def stems(text: str) -> set[str]:
    """Words of a text or of its identifiers in lower case, without endings: ``RankGroups`` has rank and group."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text) + re.findall(r"[A-Za-z]+", text)  # CPUs, SiLU
    return {SUFFIX.sub("", re.sub(r"(?<=[a-z]{3})(?<!s)s$", "", word.lower())) for word in words if len(word) > 1}


@cache
def terms() -> set[str]:
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return (stems(" ".join(rows)) | stems(PLAIN_NOUNS)) - stems(f"{FILLERS} point zero term reduce")


def count_overused(paths: Iterable[Path]) -> Counter[str]:
    texts = (" ".join(text.split()) for path in paths for _, text, _ in docstrings(ast.parse(path.read_text("utf-8"))))
    return Counter(phrase.lower() for text in texts for phrase in OVERUSED.findall(text))


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
        if isinstance(node, FUNCTIONS):
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
        (riddles, '"""What comes of it."""'),
        (riddles, 'draft_right: int\n"""Number of these that were found."""'),
        (riddles, 'class Limit:\n    least: float\n    """Likewise."""'),
        (riddles, 'def find_end(text: str) -> int:\n    """Find those that come later."""'),
        (riddles, 'def close(self) -> None:\n    """Close what is open."""'),
        (riddles, 'def reset(self, count: int) -> None:\n    """Set so many of them back to an empty set."""'),
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


def test_subject_may_be_a_name_a_word_of_the_signature_or_a_term():
    for source in (
        'def wait(self, timeout: float) -> None:\n    """Wait at most `timeout`."""',
        'def wait(self, timeout: float) -> None:\n    """Raise after the timeout."""',
        'def read(self) -> PlanGroup:\n    """Read the next group."""',
        'class Link:\n    def close(self) -> None:\n        """Close the link."""',
        'num_found: int\n"""Evicted ones."""',
        'LIMIT = 3\n"""Preemptions after which it ends."""',
    ):
        assert not list(riddles(ast.parse(source)))


def test_phrases_in_place_of_a_noun_stay_rare(tmp_path: Path):
    path = tmp_path / "example.py"
    path.write_text('"""The same\nas so many of what is told; what follows is likewise so many."""\n', encoding="utf-8")
    assert count_overused([path]) == {"the same": 1, "so many": 2, "what is": 1, "likewise": 1}
    counts = count_overused(sorted((ROOT / "labinfer").rglob("*.py")))
    assert counts.total() <= MAX_OVERUSED, dict(counts)


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
