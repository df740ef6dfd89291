"""Every file says what it is; the READMEs tell the truth about each other and the command line."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from labinfer.cli.command_table import COMMANDS
from labinfer.cli.flags import build_parser

ROOT = Path(__file__).parents[2]
OPENINGS = {".py": '"""', ".cpp": "// ", ".h": "// ", ".js": "// ", ".css": "/* ", ".html": "<!doctype html>"}
"""How a file of ours begins; most say at once what they are."""
SOURCES = [path for path in (ROOT / "labinfer").rglob("*") if path.suffix in OPENINGS and "vendor" not in path.parts]


def test_every_file_of_the_tree_says_what_it_is():
    for path in SOURCES:
        assert path.read_text(encoding="utf-8").startswith(OPENINGS[path.suffix]), f"{path} does not say what it is"


def test_a_class_name_means_one_class():
    places = defaultdict(list)
    for path in SOURCES:
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_both_readmes_have_the_same_sections_and_commands():
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    assert english.count("\n## ") == chinese.count("\n## ")
    commands = [
        re.findall(r"^    (?:\$ )?((?:python|torchrun|mpirun|srun|make|pip)\b[^#\n]*?)\s*(?:#.*)?$", text, re.M)
        for text in (english, chinese)
    ]
    assert commands[0] == commands[1]


DOCUMENTS = sorted(
    path
    for folder in (".", "docs", "docs/zh", "hostfiles", "examples")
    for path in (ROOT / folder).glob("*.md")
    if path.name != "CHANGELOG.md"
)


def test_links_in_the_documentation_lead_somewhere():
    for path in DOCUMENTS:
        text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", path.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            assert "://" in target or (path.parent / target).exists(), f"{path}: {target}"


def test_chinese_documentation_has_full_width_punctuation():
    for path in (ROOT / "README.zh-CN.md", *sorted((ROOT / "docs/zh").glob("*.md"))):
        text = re.sub(r"(?ms)^```.*?^```|^    .*$|`[^`\n]*`|\]\([^)]*\)|<[^>]*>", "", path.read_text(encoding="utf-8"))
        assert not re.search(r".{0,20}[\u4e00-\u9fff][,;:(?!].{0,20}", text), path


def test_flags_in_the_documentation_exist():
    known = {flag for name in COMMANDS for flag in build_parser(name)._option_string_actions}
    for name in DOCUMENTS:
        for line in name.read_text(encoding="utf-8").splitlines():
            if "launch.py" in line:
                ours = line.split("launch.py", 1)[1].split("#")[0]
                for flag in re.findall(r"(?<![\w-])(--?[a-z][a-z-]+)", ours):
                    assert flag in known, f"{name}: {flag} in {line!r}"
