"""Build a wheel whose libraries are compiled beforehand, so that no compiler is needed where it is installed.

    python tools/build_wheel.py [--output dist] [--targets x86-64-v3,armv8.2]

Takes a compiler for each machine of ``labinfer/native/targets.py``: this one's, and for others ``MACHINE-linux-gnu-g++``, without
which their kinds are left out. The wheel runs on systems whose C library is not older than this one's; elsewhere, and on other
processors, what it needs is compiled as from a checkout.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from labinfer.comm import shared_memory  # noqa: E402
from labinfer.functions.cpu import library  # noqa: E402
from labinfer.native import compiler  # noqa: E402
from labinfer.native.targets import TARGETS, Target  # noqa: E402

PACKAGED = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "labinfer")
LIBRARIES = (
    (library.NAME, library.SOURCES, library.FLAGS),
    (shared_memory.NAME, shared_memory.SOURCES, ()),
)


def compile_libraries(folder: Path, targets: list[Target]) -> list[Path]:
    """All libraries for each kind of processor for which there is a compiler."""
    folder.mkdir()
    made = []
    for target in targets:
        try:
            compiler.find_compiler(target)
        except compiler.NoCompiler as error:
            print(f"{target.name} is left out: {error}")
            continue
        for name, sources, flags in LIBRARIES:
            made.append(compiler.build_prebuilt(name, sources, folder, flags, target))
            print(f"{made[-1].name}: {made[-1].stat().st_size >> 10} KiB", flush=True)
    return made


def build_wheel(output: Path, targets: list[Target]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "labinfer"
        tree.mkdir()
        for name in PACKAGED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
            else:
                shutil.copy(ROOT / name, tree / name)
        if not compile_libraries(tree / compiler.PREBUILT.relative_to(ROOT), targets):
            raise SystemExit("there is no compiler, so a wheel would be like the checkout")
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "wheel",
            "--no-deps",
            "--wheel-dir",
            str(output),
        ]
        if importlib.util.find_spec("setuptools"):
            command.append("--no-build-isolation")  # else pip fetches it
        subprocess.run([*command, str(tree)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    known = {target.name: target for target in TARGETS}
    parser.add_argument("--targets", default=",".join(known), help="kinds of processors (default: %(default)s)")
    arguments = parser.parse_args()
    names = arguments.targets.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--targets: no {unknown[0]} among {', '.join(known)}")
    build_wheel(arguments.output.resolve(), [known[name] for name in names])


if __name__ == "__main__":
    main()
