"""The compiled functions of this folder's C++ files: built once for each machine, loaded through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
COMPILERS = ("g++", "c++", "clang++")
TIME_LIMIT = 120


class NoCompiler(Exception):
    """The functions could not be compiled; the text says why."""


def build(cache: Path) -> Path:
    """The library for this machine in ``cache``, compiled if it is not there yet.

    The file's name says what it depends on: the source, the flags, the compiler and the processor. It appears under that
    name when it is complete, so several processes may build at once.

    Raises:
        NoCompiler: there is none, or it failed.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    path = cache / f"kernels-{_fingerprint(compiler)}.so"
    if path.exists():
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            unfinished = Path(directory) / path.name
            command = [compiler, *FLAGS, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(unfinished)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
            if done.returncode:
                reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise NoCompiler(f"{compiler} failed: {reason:.300}")
            os.replace(unfinished, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{compiler}: {error}") from None
    return path


def load(path: Path) -> ctypes.CDLL:
    """The library's functions. Its OpenMP is torch's, which is loaded already: one pool of threads."""
    library = ctypes.CDLL(str(path))
    pointer, size, count, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    arguments = {
        "pack_weight": [pointer, size, size, count],
        "linear": [pointer] * 4 + [size] * 3 + [count],
        "quantize_int8": [pointer] * 3 + [size] * 2 + [count] * 2,
        "quantize_int4": [pointer] * 2 + [size] * 3 + [count] * 2,
        "linear_int8": [pointer] * 5 + [size] * 3 + [count] * 2,
        "linear_int4": [pointer] * 4 + [size] * 4 + [count] * 2,
        "embedding_int8": [pointer] * 4 + [size] * 4 + [count] * 2,
        "embedding": [pointer] * 3 + [size] * 4 + [count],
        "add_rms_norm": [pointer] * 4 + [size] * 2 + [real, count],
        "silu_and_mul": [pointer] * 2 + [size] * 2 + [count],
        "rotate_and_write": [pointer] * 7 + [size] * 4 + [count],
        "attend": [pointer] * 9 + [size] * 5 + [real, size, count],
    }
    counted = {"ceiling_memory": [pointer, size, count], "ceiling_float32": [size, count]}
    where_there_is_the_instruction = {
        "linear_dot": arguments["linear"],
        "attend_dot": arguments["attend"],
        "ceiling_dot": [size, count],
        "ceiling_int8": [size, count],
    }
    present = {name: types for name, types in where_there_is_the_instruction.items() if hasattr(library, name)}
    for name, types in (arguments | counted | present).items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, size if name.startswith("ceiling_") else None
    return library


def processor() -> str:
    """Its model and what it can do: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _fingerprint(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.blake2b(digest_size=8)
    sources = [path.read_text(encoding="utf-8") for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])]
    for part in (*sources, " ".join(FLAGS), version, processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()
