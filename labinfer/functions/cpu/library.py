"""Compiled functions of this folder's C++ files, loaded with ctypes."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, Protocol

import torch

from labinfer.native import compiler
from labinfer.native.memory import use_huge_pages
from labinfer.native.targets import Target

logger = logging.getLogger(__name__)

NAME, SOURCES, FLAGS = "kernels", Path(__file__).parent, ("-pthread",)
"""Name, source folder and flags of this library, for ``compiler.load``."""


def build(
    cache: Path | None = None,
    on_progress: compiler.OnProgress = lambda done, total: None,
    *,
    target: Target | None = None,
    only_ready: bool = False,
) -> ctypes.CDLL:
    """Compile and load the library for this machine, or for the processors of ``target``; see ``compiler.load``.

    Raises:
        NoCompiler: there is no compiler, it failed, or ``only_ready`` and the library is not compiled yet.
        OSError: the library cannot be loaded.
    """
    return compiler.load(NAME, SOURCES, cache, FLAGS, on_progress, target=target, only_ready=only_ready)


KERNELS = ("", "amx", "dot")
"""Instruction sets that matrix products are compiled for, as suffixes of C++ function names: plain vector instructions (no suffix; float32
and integers), AMX tiles (bfloat16 and integers), and bfloat16 dot products. Without autotuning the last one that the processor has is
preferred, as it is fast with few rows."""
PRODUCTS = (
    *("linear", "linear12", "linear_int8", "linear_groups", "sum_linear", "sum_linear_int8", "sum_linear_groups"),
    *("experts", "attend", "attend_latent"),
)
"""Functions that are compiled for several of ``KERNELS``."""


WORDS = {ctypes.c_void_p: "Q", ctypes.c_int64: "q", ctypes.c_int: "i4x", ctypes.c_float: "f4x"}
"""``struct`` format of each argument type; every argument fills one 8-byte word."""


class Observer(Protocol):
    """Observer of C++ calls; records them for the replay of a captured step."""

    def add_call(self, again: int | None, form: Struct, arguments: Sequence[Any]) -> None:
        """Record a call.

        Args:
            again: address of the function that repeats the call with arguments from memory; None if the call cannot be replayed.
            form: memory format of ``arguments`` (``replay.h``).
        """

    def run(self, step: Callable[[], None]) -> None:
        """Call ``step`` now and at each replay. Library calls that it makes are not recorded."""


class Library:
    """The compiled functions as attributes, by their C++ names; functions that need instructions which the processor
    lacks are left out."""

    def __init__(self, compiled: ctypes.CDLL):
        self.compiled = compiled
        self.file_name = Path(compiled._name).name
        """File name, which identifies the sources and the compiler that the library was built from."""
        self.observer: Observer | None = None
        self.kernels = tuple(kernel for kernel in KERNELS if _has_kernel(compiled, kernel))
        """Members of ``KERNELS`` that the processor and the operating system support."""
        self.bytes_kernel = _bytes_kernel(compiled, self.kernels)
        """Member of ``kernels`` whose products widen 4- and 5-bit codes to bytes (``linear_groups_bytes``), or None."""
        self.replay = compiled.replay

    def add(self, name: str, function: ctypes._CFuncPtr, again: Callable | None) -> None:
        """Set ``function``, which returns nothing, as the attribute ``name``. A captured graph repeats its calls with
        ``again``; None if they cannot be captured."""
        address = None if again is None else ctypes.cast(again, ctypes.c_void_p).value
        form = Struct("=" + "".join(map(WORDS.__getitem__, function.argtypes)))

        def call(*arguments):
            if self.observer is not None:
                self.observer.add_call(address, form, arguments)
            function(*arguments)

        setattr(self, name, call)

    def find(self, name: str, kernel: str) -> Callable:
        """Return the C++ function ``name``, compiled for the instruction set ``kernel``, a member of ``KERNELS``."""
        return getattr(self, f"{name}_{kernel}" if kernel else name)

    def find_typed(self, name: str, dtype: torch.dtype) -> Callable:
        """Return the C++ function ``name``, compiled for tensors of ``dtype``."""
        return getattr(self, f"{name}_{str(dtype).removeprefix('torch.')}")

    def run(self, step: Callable[[], None]) -> None:
        """Call ``step``, which depends on tensor values. A captured graph calls it again in Python at each replay."""
        if self.observer is not None:
            self.observer.run(step)
        else:
            step()


def load(compiled: ctypes.CDLL) -> Library:
    """Declare the argument types of all functions of a library that ``build`` has loaded."""
    library = Library(compiled)
    pointer, size, count, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    arguments = {
        "pack_weight": [pointer, size, size, count],
        "linear": [pointer] * 4 + [size] * 3 + [count] * 2,
        "linear12": [pointer] * 4 + [size] * 3 + [count] * 2,
        "pack12": [pointer] * 4 + [size] * 2 + [count],
        "quantize_int8": [pointer] * 3 + [size] * 2 + [count] * 2,
        "quantize_int4": [pointer] * 2 + [size] * 3 + [real] + [count] * 2,
        "linear_int8": [pointer] * 5 + [size] * 3 + [count] * 3,
        "pack_codes": [pointer] * 5 + [size] * 3 + [count] * 3 + [real, count],
        "linear_groups": [pointer] * 4 + [size] * 5 + [count] * 3 + [real] + [count] * 3,
        "sum_linear": [pointer] * 2 + [size] + [pointer] * 2 + [size] * 2 + [count],
        "sum_linear_int8": [pointer] * 2 + [size] + [pointer] * 2 + [size] * 2 + [count] * 2,
        "sum_linear_groups": [pointer] * 2 + [size] + [pointer] * 2 + [size] * 3 + [count] * 5,
        "transpose_words": [pointer, size] * 2 + [size] * 2 + [count],
        "transpose_awq": [pointer, size] * 2 + [size] * 2 + [count],
        "decode": [pointer, size] + [pointer] * 2 + [size] + [pointer] * 2 + [size] * 6 + [count] * 4,
        "round_groups": [pointer, size] * 3 + [size] * 4 + [count],
        "embedding_int8": [pointer] * 4 + [size] * 4 + [count] * 2,
        "embedding_groups": [pointer] * 3 + [size] * 6 + [count] * 3 + [real] + [count] * 2,
        "embedding12": [pointer] * 3 + [size] * 4 + [count],
        "embedding": [pointer] * 3 + [size] * 4 + [count],
        "pack_expert": [pointer, size] + [pointer] * 2 + [real] * 2 + [count] * 2,
        "pack_expert_codes": [pointer, size] + [pointer] * 2 + [count],
        "experts": [pointer] * 2 + [count],
        "route": [pointer] * 8 + [size] * 2 + [count] * 3,
        "attend_latent": [pointer] * 8 + [size] * 5 + [count] * 2 + [real, count],
        "attend": [pointer] * 12 + [size] * 5 + [count] * 3 + [real, real, size, count],
    } | dict.fromkeys(("argmax_bfloat16", "argmax_float32"), [pointer] * 2 + [size] * 2 + [count])
    arguments |= dict.fromkeys(("sample_bfloat16", "sample_float32"), [pointer] * 3 + [size] * 2 + [count])
    for dtype in ("bfloat16", "float32", "float16"):
        arguments[f"add_rms_norm_{dtype}"] = [pointer] * 4 + [size] * 2 + [real] + [count] * 2
        arguments[f"silu_and_mul_{dtype}"] = arguments[f"gelu_and_mul_{dtype}"] = [pointer] * 2 + [size] * 2 + [count]
        arguments[f"rotate_and_write_{dtype}"] = [pointer] * 10 + [size] * 5 + [count] * 2 + [size] + [count] * 2
        arguments[f"write_latent_{dtype}"] = [pointer] * 8 + [size] * 6 + [real] + [count] * 3
        arguments[f"absorb_queries_{dtype}"] = [pointer] * 3 + [size] * 6 + [count]
        arguments[f"expand_values_{dtype}"] = [pointer] * 3 + [size] * 5 + [count]
        arguments[f"causal_conv_{dtype}"] = [pointer] * 8 + [size] * 4 + [count]
        arguments[f"delta_rule_{dtype}"] = [pointer] * 10 + [size] * 5 + [count]
        arguments[f"gated_norm_{dtype}"] = [pointer] * 4 + [size] * 4 + [real, count]
        arguments[f"selective_scan_{dtype}"] = [pointer] * 11 + [size] * 6 + [real] * 2 + [count]
        arguments[f"gated_group_norm_{dtype}"] = arguments[f"gated_norm_{dtype}"]
    for dtype in ("float32", "float16"):
        arguments[f"pack_{dtype}"] = arguments["pack_weight"]
        arguments[f"linear_{dtype}"], arguments[f"sum_linear_{dtype}"] = arguments["linear"], arguments["sum_linear"]
        arguments[f"embedding_{dtype}"] = arguments["embedding"]
    counted = {
        "expert_bytes": [pointer],
        "count_patches": [pointer, size, size, pointer, pointer, count],
        "packed12_bytes": [size] * 3,
        "checksum": [pointer, size],
        "read_rows": [count, size, size, pointer, size, size, size, count],
        "roofline_memory": [pointer, size, count],
        "roofline_float32": [size, count],
        "reader_open": [count, size, count],
        "reader_wait": [pointer, size],
    }
    never_captured = {"reader_add": [pointer, size, size, pointer, size, size], "reader_close": [pointer]}
    where_there_is_the_instruction = {
        f"{name}_{kernel}": arguments[name] for kernel in library.kernels[1:] for name in PRODUCTS
    } | dict.fromkeys(("roofline_dot", "roofline_int8"), [size, count])
    if "amx" in library.kernels:
        where_there_is_the_instruction |= dict.fromkeys(("roofline_amx", "roofline_int8_amx"), [size, count])
    if library.bytes_kernel is not None:
        where_there_is_the_instruction["linear_groups_bytes"] = arguments["linear_groups"]
        where_there_is_the_instruction["sum_linear_groups_bytes"] = arguments["sum_linear_groups"]
    present = {name: types for name, types in where_there_is_the_instruction.items() if hasattr(compiled, name)}
    for name, types in (arguments | counted | never_captured | present).items():
        function = getattr(compiled, name)
        function.argtypes = types
        if name in counted or name.startswith("roofline_"):
            function.restype = size
            setattr(library, name, function)
            continue
        function.restype = None
        if name in never_captured:
            setattr(library, name, function)
        else:
            library.add(name, function, getattr(compiled, f"replay_{name}", None))
    compiled.replay.argtypes, compiled.replay.restype = [pointer, size], None
    return library


def _bytes_kernel(compiled: ctypes.CDLL, kernels: tuple[str, ...]) -> str | None:
    kernel = "amx" if hasattr(compiled, "linear_groups_amx") else ""
    return kernel if hasattr(compiled, "linear_groups_bytes") and kernel in kernels else None


def _has_kernel(compiled: ctypes.CDLL, kernel: str) -> bool:
    if kernel and not hasattr(compiled, f"linear_{kernel}"):
        return False
    if kernel == "amx" and not compiled.allow_amx():
        logger.info("the processor has AMX, but the system does not let this process use it")
        return False
    return True


def new_bytes(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uninitialised memory for packed weights, in huge pages; a tensor without memory on the meta device."""
    memory = torch.empty(count, dtype=torch.uint8, device=device)
    if not memory.is_meta:
        use_huge_pages(memory.data_ptr(), count)
    return memory


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Convert float16, which the library does not read, to float32; other dtypes are unchanged."""
    return tensor.float() if tensor.dtype == torch.float16 else tensor
