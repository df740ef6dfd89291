"""Print the packages and files of labinfer/, each with the first line that it says of itself.

python tools/tree.py [PACKAGE]      all, or those of one package, such as engine or server/gateway
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "labinfer"
OPENINGS = {".py": '"""', ".cpp": "// ", ".h": "// ", ".js": "// ", ".css": "/* "}
"""First characters of a file's first line, by suffix."""
WIDTH = 160


def describe(path: Path) -> str:
    """First line of a file without its comment signs; the title of a web page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        title = re.search(r"<title>(.*?)</title>", text)
        return title[1] if title else ""
    return text.partition("\n")[0].removeprefix(OPENINGS[path.suffix]).removesuffix('"""').removesuffix("*/").strip()


def lines(folder: Path, depth: int = 0) -> Iterator[str]:
    """A line for each file and folder, files first; ``__init__.py`` speaks for its folder."""
    indent = "  " * depth
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir():
            inside = [*lines(path, depth + 1)] if path.name not in ("vendor", "__pycache__") else []
            if inside:
                yield f"{indent}{path.name + '/':<{26 - len(indent)}} {_says(path)}".rstrip()[:WIDTH]
                yield from inside
        elif path.suffix in (*OPENINGS, ".html") and path.name != "__init__.py":
            yield f"{indent}{path.name:<{26 - len(indent)}} {describe(path)}".rstrip()[:WIDTH]


def _says(folder: Path) -> str:
    file = folder / "__init__.py"
    return describe(file) if file.exists() else ""


def main(arguments: list[str]) -> int:
    folder = PACKAGE / (arguments[0].removeprefix("labinfer/").strip("/") if arguments else "")
    if not folder.is_dir():
        print(f"there is no package {folder.relative_to(PACKAGE)} in labinfer/", file=sys.stderr)
        return 2
    print(f"{folder.relative_to(PACKAGE.parent)}/ {_says(folder)}", *lines(folder, 1), sep="\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for ``| head``
    sys.exit(main(sys.argv[1:]))
