"""What documents and docstrings name is in the tree: files, identifiers, headings, flags and their defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from itertools import repeat
from pathlib import Path

import pytest

from labinfer.cli.command_table import COMMANDS
from labinfer.cli.flags import build_parser

ROOT = Path(__file__).parents[2]
FOLDERS = ("labinfer", "tests", "benchmarks", "tools", "examples", "hostfiles", "docs", "lab")
CODE = {".py", ".cpp", ".h", ".js", ".mjs", ".html", ".sh"}
SOURCES = CODE | {".sbatch", ".yaml", ".yml", ".toml", ".cfg", ".service", ".def"}
UNREAD = {"vendor", "node_modules", "__pycache__", ".venv", ".clients", ".envs"}
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/*.md", "docs/zh/*.md", "hostfiles/*.md", "lab/*.md")
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md"
]
DOCSTRING = re.compile(r'(?ms)^ *r?"""(.*?)"""')
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?")
FILE = re.compile(r"(?<![\w/.<-])[A-Za-z_][\w/.-]*\.(?:py|cpp|h|js|md)\b")
PLACEHOLDER = re.compile(r"FILE|NAME|llama\.cpp|\blab/|^--plugin")
"""A file of the reader's; llama.cpp is no file."""
MANUAL = re.compile(r"\w+\(\d\)")
"""A page of the system's manual, such as unix(7)."""
ELSEWHERE = re.compile(
    r"https?://|OpenTelemetry|Transformers|llama\.cpp|vLLM|Linux|POSIX|OpenAI|Anthropic|MPI|RFC|GPT-2|torchrun"
)
"""Marks a sentence that names the source of a foreign identifier."""
COMMANDS_OF_SHELLS = {"docker", "kubectl", "make", "mpirun", "pip", "python", "srun", "sysctl", "torchrun", "ulimit"}
SENTENCE = re.compile(r"(?<=[.;|])\s+")


@cache
def files() -> dict[Path, str]:
    """Every file of the tree by its path from the root; with the text of sources, and "" for others."""
    found = [path for path in ROOT.glob("*") if path.is_file()]
    for folder in FOLDERS:
        for directory, folders, names in os.walk(ROOT / folder):
            folders[:] = set(folders) - UNREAD
            found += [Path(directory, name) for name in names]
    return {
        path.relative_to(ROOT): path.read_text(encoding="utf-8")
        if path.suffix in SOURCES or path.name in ("Makefile", "Dockerfile")
        else ""
        for path in found
        if path != Path(__file__)
    }


def own_modules() -> Iterator[tuple[Path, str]]:
    return ((path, text) for path, text in files().items() if path.suffix == ".py" and path.parts[0] == "labinfer")


@cache
def words() -> set[str]:
    """Every word of the sources but those of labinfer's docstrings and comments, and every part of a path."""
    own = {path: re.sub(r"(?m)(?:^|\s)# .*", "", DOCSTRING.sub("", text)) for path, text in own_modules()}
    known = set(re.findall(r"[A-Za-z_]\w*", "\n".join((files() | own).values())))
    return known.union(*({*path.parts, path.stem} for path in files()))


@cache
def paths() -> set[str]:
    """Every path of a file or folder of the tree, and each of its ends."""
    ends: set[str] = set()
    for path in files():
        parts = path.parts
        for stop in range(1, len(parts) + 1):
            ends.update("/".join(parts[start:stop]) for start in range(stop))
    return ends


def unknown_names(text: str) -> list[str]:
    """Code spans of a text that name a file or an identifier which neither the tree has nor the sentence ascribes to another project."""
    sentences = (sentence for sentence in SENTENCE.split(text) if not ELSEWHERE.search(sentence))
    missing = []
    for span in re.findall(r"`+([^`\n]+)`+", "\n".join(sentences)):
        if PLACEHOLDER.search(span) or span in paths():
            continue
        if named_files := FILE.findall(span):
            missing += [name for name in named_files if name not in paths()]
        elif (
            (match := NAME.fullmatch(span))
            and not MANUAL.fullmatch(span)
            and not all(map(is_known, match[1].split(".")))
        ):
            missing.append(span)
    return missing


def is_known(name: str) -> bool:
    """Whether a source has the word; with an underscore at its beginning or end, whether some word ends or begins like it."""
    if name in words():
        return True
    return (name[0] == "_" and any(map(str.endswith, words(), repeat(name)))) or (
        name[-1] == "_" and any(map(str.startswith, words(), repeat(name)))
    )


def prose(path: Path) -> str:
    """A document without its code blocks."""
    return re.sub(r"(?ms)^```.*?^```|^    .*?$", "", path.read_text(encoding="utf-8"))


def headings(path: Path) -> set[str]:
    """The fragments by which GitHub addresses the headings of a document."""
    text = re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8"))
    titles = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in re.findall(r"(?m)^#+ (.+)$", text))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def options() -> dict[str, list]:
    """The actions of all commands' parsers by flag."""
    actions: dict[str, list] = {}
    for command in COMMANDS:
        for action in build_parser(command)._actions:
            for flag in action.option_strings:
                actions.setdefault(flag, []).append(action)
    return actions


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_documents_are_in_the_tree(path):
    assert not unknown_names(prose(path))


def test_names_in_docstrings_are_in_the_tree():
    missing = [
        f"{path}: {name}"
        for path, text in own_modules()
        for docstring in DOCSTRING.findall(text)
        for name in unknown_names(docstring)
    ]
    assert not missing


@pytest.mark.parametrize(
    "text",
    ["`no_such_name`", "``Scheduler.method_that_is_missing``", "`engine/no_such_file.py`", "see `NoSuchClass(…)`"],
)
def test_names_that_the_tree_lacks_are_found(text):
    assert unknown_names(text)


@pytest.mark.parametrize("text", ["`Scheduler.schedule`", "``engine/scheduler.py``", "`--plugin FILE.py`", "`a b`"])
def test_names_that_the_tree_has_are_passed(text):
    assert not unknown_names(text)


def test_fragments_of_links_are_headings():
    missing = []
    for path in DOCUMENTS:
        for target, fragment in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", prose(path)):
            linked = (path.parent / target).resolve() if target else path
            if "://" not in target and linked.suffix == ".md" and fragment not in headings(linked):
                missing.append(f"{path.relative_to(ROOT)}: {target}#{fragment}")
    assert not missing


def test_every_flag_is_on_the_page_of_options():
    listed = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", prose(ROOT / "docs" / "options.md")))
    actions = {id(action): action for several in options().values() for action in several}.values()
    assert not {
        tuple(action.option_strings)
        for action in actions
        if action.option_strings and not listed & set(action.option_strings)
    }


def test_page_of_options_has_the_flags_and_defaults_of_the_code():
    actions = options()
    for row in re.findall(r"(?m)^\| (`-.*)$", prose(ROOT / "docs" / "options.md")):
        cells = re.split(r"(?<!\\)\|", row)
        default = re.fullmatch(r"\s*`(.*)`\s*", cells[1])
        for flag in re.findall(r"`(--?[a-z-]+)", cells[0]):
            assert flag in actions, f"no command has {flag}"
            helps = {action.help for action in actions[flag] if action.help}
            if default is not None:
                assert any(text.endswith(f"(default: {default[1]})") for text in helps), f"{flag} {default[1]}: {helps}"


def test_records_of_decisions_are_a_page_and_in_the_index():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for path in folder.glob("0*.md"):
        assert len(path.read_text(encoding="utf-8").split()) <= 850, f"{path.name} exceeds a page"
        assert index.count(f"({path.name})") == 1, f"{path.name} must be once in the index"


def test_metrics_in_documents_are_exported():
    known = set(
        re.findall(
            r"\b(?:vllm|labinfer):[a-z_]+", "\n".join(text for path, text in files().items() if path.suffix == ".py")
        )
    )
    for path in (*DOCUMENTS, ROOT / "CHANGELOG.md"):
        for name in re.findall(r"`((?:vllm|labinfer):[a-z_]+)`", path.read_text(encoding="utf-8")):
            assert {name, name.removesuffix("_total")} & known, f"{path.name}: {name}"


@pytest.mark.parametrize(
    "path",
    [
        "docs/troubleshooting.md",
        "docs/zh/troubleshooting.md",
        "docs/operations.md",
        "docs/zh/operations.md",
        "docs/reliability.md",
    ],
)
def test_messages_in_documents_are_in_the_sources(path):
    """Of a quoted message a third of the runs of three words stand in the sources; the others contain values."""
    for message in re.findall(r"`([a-z][^`\n]+)`", prose(ROOT / path)):
        message_words = message.split()
        if len(message_words) >= 5 and message_words[0] not in COMMANDS_OF_SHELLS:
            runs = [" ".join(message_words[i : i + 3]) for i in range(len(message_words) - 2)]
            runs = [run for run in runs if not re.search(r"[0-9…]", run)]
            known = sum(run in literals() for run in runs)
            assert 3 * known >= len(runs), f"{path}: no source has the message {message!r}"


@cache
def literals() -> str:
    """The text of labinfer's modules with adjacent string literals joined."""
    return re.sub(r'"\s*\n\s*[fr]*"', "", "\n".join(text for _, text in own_modules()))
