"""Products' inner loops and whole functions, compiled for every kind of processor: right on each, and quick on one with vectors
of 8 floats."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labinfer.functions.cpu import library
from labinfer.native import compiler
from labinfer.native.targets import TARGETS, X86_64_V3, X86_64_V4, Target, processor_features

GROUP_PANELS = ("group_panels", *(f"group_panels_{codes}" for codes in ("4", "5", "8", "table", "amx")))
CHECKS = {
    "kernel_check": ("amx", "thread_pool", *GROUP_PANELS),
    "functions_check": ("amx", "thread_pool", "attention", "elementwise", "linear", "gemm_f32", "delta_rule", "mamba"),
}
"""Programs of this folder, and files of the library that each is linked with."""
EMULATORS = {"aarch64": "qemu-aarch64"}
OTHERS = (
    Target("x86-64", "x86_64", ("-march=x86-64",), frozenset()),
    Target("x86-64-v2", "x86_64", ("-march=x86-64-v2",), frozenset({"ssse3", "sse4_1"})),
    Target("sandybridge", "x86_64", ("-march=sandybridge",), frozenset({"avx"})),
    Target("armv8", "aarch64", ("-march=armv8-a",), frozenset()),
)
"""Kinds for which no library is compiled beforehand, but some machines compile their own."""
SAMPLE = ("x86-64-v3", "armv8.2")
"""What is checked in every run of the tests."""
FLOORS = {("int8", 1): 30.0, ("int8", 64): 75.0, ("int4", 1): 30.0, ("int4", 64): 90.0}
"""Billions of products and sums a second on one thread, by weights and rows: of half of the machine that it is meant for."""


def compile_check(target: Target, folder: Path, name: str = "kernel_check", *, level: str = "-O1") -> Path:
    """A program for a target.

    Raises:
        Skipped: there is no compiler for it.
    """
    found = find_compiler(target)
    folder.mkdir(exist_ok=True)
    sources = [Path(__file__).with_name(f"{name}.cpp"), *(library.SOURCES / f"{part}.cpp" for part in CHECKS[name])]
    flags = [*compiler.FLAGS, *target.flags, *library.FLAGS, level, f"-I{library.SOURCES}"]
    assembly = [folder / f"{source.stem}.s" for source in sources]
    for source, out in zip(sources, assembly, strict=True):
        run([found, *flags, "-S", str(source), "-o", str(out)])
    if name == "kernel_check" and "avx_vnni" in target.features and not target.runs_here():
        recoded = [path for path in assembly if recode(path)]
        assert len(recoded) > 1
    program = folder / name
    run([found, *flags, "-static", *map(str, assembly), "-o", str(program)])
    return program


def find_compiler(target: Target) -> str:
    """The compiler for a target.

    Raises:
        Skipped: there is none.
    """
    try:
        return compiler.find_compiler(target)
    except compiler.NoCompiler as error:
        pytest.skip(str(error))


def recode(assembly: Path) -> bool:
    """Write AVX-VNNI's dot product as that of AVX-512, which does the same in the same registers on other processors. Returns whether
    there is one."""
    text = assembly.read_text(encoding="utf-8")
    assembly.write_text(text.replace("{vex} vpdpbusd", "{evex} vpdpbusd"), encoding="utf-8")
    return "{vex} vpdpbusd" in text


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[:3000]
    return done.stdout


def starter(target: Target) -> list[str]:
    """What runs a program for ``target`` here.

    Raises:
        Skipped: nothing does.
    """
    stands_in = "avx_vnni" in target.features and X86_64_V4 | {"avx512_vnni"} <= processor_features()
    if target.runs_here() or stands_in:
        return []
    emulator = EMULATORS.get(target.machine)
    if emulator is None or shutil.which(emulator) is None:
        pytest.skip(
            f"this machine does not run what is compiled for {target.name}, and has no {emulator or 'emulator'}"
        )
    return [emulator, "-cpu", "max"]


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, id=target.name, marks=() if target.name in SAMPLE else pytest.mark.slow)
        for target in (*TARGETS, *OTHERS)
    ],
)
def test_products_are_exact_on_every_kind_of_processor(target, tmp_path):
    start = starter(target)
    assert run([*start, str(compile_check(target, tmp_path))]) == "0 wrong\n"


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, id=target.name, marks=() if target.name == "armv8.6" else pytest.mark.slow)
        for target in (*TARGETS, *OTHERS)
    ],
)
def test_functions_are_right_on_every_kind_of_processor(target, tmp_path):
    """In every run of the tests on ARM, where there is an emulator: on this machine's own processor other tests run them."""
    start = starter(target)
    assert run([*start, str(compile_check(target, tmp_path, "functions_check"))]) == "0 wrong\n"


@pytest.mark.parametrize(
    ("target", "ways"),
    [
        pytest.param(TARGETS[0], ["-fsyntax-only"], id=f"{TARGETS[0].name}-quickly"),
        *(
            pytest.param(target, ["-O1", "-S", "-o", os.devnull], id=target.name, marks=pytest.mark.slow)
            for target in (*TARGETS, *OTHERS)
        ),
    ],
)
def test_library_compiles_for_every_kind_of_processor(target, ways):
    """Also for processors with more instructions than this one has: no other test sees what is only for those. In every run the
    compiler only checks types, for the one with most."""
    command = [find_compiler(target), *compiler.FLAGS, *target.flags, *library.FLAGS, *ways]
    if subprocess.run([*command, "-x", "c++", os.devnull], capture_output=True).returncode:
        pytest.skip(f"the compiler is older than {target.name}")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        said = threads.map(run, ([*command, str(source)] for source in sorted(library.SOURCES.glob("*.cpp"))))
        assert len(list(said)) > 20


@pytest.mark.timing
def test_whole_numbers_are_quick_without_a_dot_product_of_bytes(tmp_path):
    target = Target("x86-64-v3", "x86_64", ("-march=x86-64-v3",), X86_64_V3)
    start = starter(target)
    program = compile_check(target, tmp_path, level="-O3")
    rates = [line.split() for line in run([*start, str(program), "speed"]).splitlines()]
    found = {(name, int(rows)): float(rate) for name, rows, rate, _ in rates}
    assert {key: rate for key, rate in found.items() if rate < FLOORS.get(key, 0)} == {}
