"""Code blocks of the documentation: fenced and indented ones, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path for folder in (".", "docs", "docs/zh") for path in (ROOT / folder).glob("*.md") if path.name != "CHANGELOG.md"
)
PROGRAMS = (
    "apptainer", "cp", "curl", "docker", "echo", "export", "git", "kubectl", "lighteval", "lm_eval", "make", "mpirun", "pip", "python",
    "sh", "srun", "systemctl", "tar", "torchrun",
)  # fmt: skip
"""Programs that the documentation calls, and builtins of the shell."""


@dataclass(frozen=True)
class CodeBlock:
    """A code block of a document."""

    path: Path
    line: int
    """Line of the document at which it begins, from 1."""
    language: str
    """As a fence has it; "" for indented blocks."""
    text: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Shell commands without prompt and comment, a continued one as one line, and ``labinfer`` as ``python launch.py``."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        stripped = (re.sub(r"\s{2,}#.*", "", line).strip().removeprefix("$ ") for line in lines)
        stripped = (re.sub(r"^labinfer ", "python launch.py ", line) for line in stripped)
        return [line for line in stripped if _first_program(line) in PROGRAMS]


def code_blocks(path: Path) -> Iterator[CodeBlock]:
    """The code blocks of a document, in order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        begin, line = number, lines[number]
        if line.startswith("```"):
            number = lines.index("```", number + 1)
            yield CodeBlock(path, begin + 2, line[3:], "\n".join(lines[begin + 1 : number]) + "\n")
        elif line.startswith("    ") and (not begin or not lines[begin - 1]):
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or not lines[number + 1]):
                number += 1
            text = "\n".join(each[4:] for each in lines[begin : number + 1]).rstrip() + "\n"
            yield CodeBlock(path, begin + 1, "", text)
        number += 1


def all_blocks() -> list[CodeBlock]:
    return [block for path in DOCUMENTS for block in code_blocks(path)]


def documented_commands() -> dict[str, str]:
    """Every command, with the place of the block that has it first."""
    places: dict[str, str] = {}
    for block in all_blocks():
        for command in block.commands:
            places.setdefault(command, block.name)
    return places


def python_block(path: str, begins: str) -> str:
    """The code block of this document that has the text ``begins``."""
    (block,) = (block for block in code_blocks(ROOT / path) if block.language == "python" and begins in block.text)
    return block.text


def _first_program(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    return next((word for word in words if not re.fullmatch(r"[A-Z]+=.*", word)), "")
