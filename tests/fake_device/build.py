"""Compiles the make-believe accelerator once, and shows it to subprocesses."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from labinfer.native.cache_file import LOCK, digest, locked
from labinfer.native.compiler import NoCompiler, default_cache, find_compiler

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
FLAGS = ("-std=c++20", "-O1", "-fPIC", f"-I{TORCH / 'include'}")
WAIT_LIMIT = 600
METADATA = "Metadata-Version: 2.1\nName: labinfer-fake-device\nVersion: 1\n"
ENTRY_POINTS = "[torch.backends]\nfake_device = fake_device.plugin:load\n"


def build() -> Path:
    """The compiled library, from the cache of compiled functions if the sources, torch and the compiler are the same.

    Raises:
        NoCompiler: there is no compiler, or it failed.
    """
    compiler = find_compiler()
    sources = sorted(HERE.glob("*.cpp"))
    texts = [path.read_bytes() for path in (*sources, *sorted(HERE.glob("*.h")))]
    name = digest(texts, FLAGS, torch.__version__, compiler)
    cache = default_cache()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = cache / f"fake-device-{name}.so"
    if path.exists():
        return path
    with locked(path.with_suffix(LOCK), WAIT_LIMIT, lambda: None):
        if not path.exists():
            _compile(compiler, sources, path)
    return path


def install(folder: Path, name: str, *switches: str) -> dict[str, str]:
    """Make ``folder`` one that brings the accelerator into every Python process that has it on its path.

    Args:
        name: device type, such as ``npu``.
        switches: see ``plugin.SWITCHES``.

    Returns:
        Environment of such processes.
    """
    package, information = folder / "fake_device", folder / "labinfer_fake_device-1.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(METADATA)
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    if not package.exists():
        package.symlink_to(HERE)
    path = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": f"{folder}:{path}" if path else str(folder),
        "FAKE_DEVICE": name,
        "FAKE_DEVICE_LIBRARY": str(build()),
        "FAKE_DEVICE_SWITCHES": ",".join(switches),
    }


def _compile(compiler: str, sources: list[Path], path: Path) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    objects = [Path(f"{unfinished}-{source.stem}.o") for source in sources]
    try:
        with ThreadPoolExecutor() as pool:
            list(
                pool.map(
                    lambda pair: _run(compiler, *FLAGS, "-c", pair[0], "-o", pair[1]),
                    zip(sources, objects, strict=True),
                )
            )
        libraries = f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"
        _run(compiler, "-shared", *objects, "-o", unfinished, *libraries)
        unfinished.replace(path)
    finally:
        for file in (*objects, unfinished):
            file.unlink(missing_ok=True)


def _run(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise NoCompiler(f"{done.args[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
