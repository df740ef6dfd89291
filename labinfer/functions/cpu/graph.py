"""Graphs of compiled calls: a step makes hundreds of short calls, many of which take less time than their Python code."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from struct import Struct
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.cpu.library import Library
from labinfer.functions.cpu.step_memory import StepMemory

logger = logging.getLogger(__name__)

Tensor = torch.Tensor
NEW_MEMORY = {torch.empty, torch.empty_like, Tensor.new_empty}
"""Calls that only allocate memory; a replay does not repeat them."""
REPEATED = {
    Tensor.__getitem__: lambda x, index, out: torch.index_select(x, 0, index, out=out),
    Tensor.add: torch.add,
    Tensor.mul: torch.mul,
    Tensor.div: torch.div,
    Tensor.tanh: torch.tanh,
    Tensor.sigmoid: torch.sigmoid,
    Tensor.clone: lambda x, out: out.copy_(x),
    Tensor.contiguous: lambda x, out: out.copy_(x),
    torch.cat: torch.cat,
    F.linear: F.linear,
    F.gelu: F.gelu,
}
"""Torch operations that layers use between functions, and their replay with an ``out`` argument. Any other one, except
views, prevents capture."""
FIXED = {"dim", "approximate"}
"""Keyword arguments of ``REPEATED`` operations that are constant across steps."""
# An operation outside of torch has the attribute ``repeats_in_place`` if it is replayed by calling it with the same tensors.
LARGE_BYTES = 1 << 16
"""Step results of at least this size, in bytes, keep their memory block if no earlier step used it; other results are copied."""
FACTS = {"data_ptr", "stride", "dim", "size", "__len__", "__get__"}
"""Methods that return neither a tensor nor tensor contents; ``__get__`` is for properties, such as the shape."""


class CompiledCall(ctypes.Structure):
    """C++ struct of replay.cpp for a recorded call, declared for ctypes."""

    _fields_ = [("function", ctypes.c_void_p), ("words", ctypes.c_void_p)]


class CpuGraph:
    """A captured step on a CPU: compiled calls with torch operations between them.

    Args:
        kept: objects that own the memory of the steps.
        num_bytes: see ``functions.graph.Graph``.
        program_bytes: see ``functions.graph.Graph``.
    """

    def __init__(
        self, steps: Iterable[Callable[[], object]], *, kept: Sequence[object], num_bytes: int, program_bytes: int
    ):
        self._steps, self._kept = tuple(steps), kept
        self.num_bytes, self.program_bytes = num_bytes, program_bytes

    def replay(self, batch: AttentionBatch | None = None) -> None:
        for step in self._steps:
            step()


class CpuCapture:
    """Capture of compiled calls, see ``functions.graph.Capture``; needs no dry run.

    Args:
        library: the library whose calls are captured.
    """

    def __init__(self, library: Library):
        self._library, self.memory = library, StepMemory()

    def __call__(
        self,
        run: Callable[[], torch.Tensor],
        dry_run: Callable[[], torch.Tensor] | None = None,
        batch: AttentionBatch | None = None,
    ) -> tuple[torch.Tensor, CpuGraph | None]:
        self.memory.begin_step()
        recording = _Recording(self.memory)
        self._library.observer = recording
        try:
            with recording:
                out = run()
        finally:
            self._library.observer = None
        if out is not None:  # ``run`` returns None on some ranks of a stage
            out = recording.keep(out)
        if recording.obstacle:
            logger.debug("steps run without graph capture: %s cannot be captured", recording.obstacle)
            return out, None
        return out, recording.graph(self._library)


class _Recording(TorchFunctionMode):
    """Records compiled calls and torch operations while it is entered.

    Args:
        memory: pool of blocks for tensors allocated meanwhile.
    """

    def __init__(self, memory: StepMemory):
        super().__init__()
        self.obstacle = ""
        """Name of the first torch operation that a captured graph cannot replay; empty if all can be replayed."""
        self._memory = memory
        self._steps: list[tuple[int, bytes] | Callable[[], object]] = []
        """Compiled calls, as addresses of functions and their arguments in the format of ``replay.h``, and Python callables."""
        self._kept: list[object] = [memory]
        self._kept_bytes = 0
        self._pauses = False

    def run(self, step: Callable[[], None]) -> None:
        again = step
        if isinstance(step, partial):
            named = {name: self._alias(argument) for name, argument in step.keywords.items()}
            again = partial(step.func, *map(self._alias, step.args), **named)
        self._steps.append(again)
        self._pauses = True
        try:
            step()
        finally:
            self._pauses = False

    def add_call(self, again: int | None, form: Struct, arguments: Sequence[Any]) -> None:
        if self._pauses:
            return
        if again is None:
            self._stop_at("a call that is not REPLAYABLE")
            return
        numbers = []
        for argument in arguments:
            if hasattr(argument, "_obj"):  # a ctypes.byref argument
                self._kept.append(argument)
                argument = ctypes.addressof(argument._obj)
            numbers.append(argument or 0)  # None is a null pointer
        self._steps.append((again, form.pack(*numbers)))

    def __torch_function__(self, operation, types, arguments=(), named=None):
        out = operation(*arguments, **(named or {}))
        if self._pauses:
            pass
        elif getattr(operation, "is_opaque", False):
            self._stop_at(f"{operation.__name__} of a plugin")
        elif not isinstance(out, torch.Tensor):
            if operation.__name__ not in FACTS:
                self._stop_at(operation.__name__)
        elif getattr(operation, "repeats_in_place", False):
            self._steps.append(partial(operation, *map(self._alias, arguments)))
        elif operation in NEW_MEMORY:
            return self._place(out)
        elif _is_view(operation, out, arguments):
            pass
        elif operation in REPEATED and _repeats(operation, arguments) and (named or {}).keys() <= FIXED:
            placed = self._place(out)
            if placed is not out:
                placed.copy_(out)
            again = partial(REPEATED[operation], *map(self._alias, arguments), **(named or {}))
            self._steps.append(partial(again, out=self._alias(placed)))
            return placed
        else:
            self._stop_at(operation.__name__)
        return out

    def _place(self, out: torch.Tensor) -> torch.Tensor:
        """A tensor like ``out`` in the step memory, or ``out`` itself if it is empty, not contiguous, or the memory is full."""
        if out.numel() and out.is_contiguous():
            placed = self._memory.empty_like(out)
            if placed is not None:
                return placed
            self._stop_at("more memory than is reserved for captured graphs")
        self._kept.append(out)
        self._kept_bytes += out.nbytes
        return out

    def _alias(self, argument: Any) -> Any:
        """The argument with its tensors, also those in a list or tuple, replaced by aliases that do not hold their blocks."""
        if isinstance(argument, torch.Tensor):
            return self._memory.alias(argument)
        return list(map(self._alias, argument)) if isinstance(argument, tuple | list) else argument

    def _stop_at(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle

    def keep(self, out: torch.Tensor) -> torch.Tensor:
        """The step's result ``out``, or a copy of it, in memory that no other step writes to."""
        own = self._memory.take(out) if out.nbytes >= LARGE_BYTES else None
        if own is None:
            own = out.clone()
            self._steps.append(partial(own.copy_, self._alias(out)))
            out = own
        self._kept += [own, out]
        self._kept_bytes += own.nbytes - out.nbytes
        return out

    def graph(self, library: Library) -> CpuGraph:
        """Graph of the recorded calls and operations."""
        steps: list[Callable[[], object]] = []
        program_bytes = 0
        for is_compiled, run in groupby(self._steps, key=lambda step: isinstance(step, tuple)):
            if is_compiled:
                calls = list(run)
                words = ctypes.create_string_buffer(b"".join(each for _, each in calls))
                array, at = (CompiledCall * len(calls))(), ctypes.addressof(words)
                for index, (function, each) in enumerate(calls):
                    array[index] = CompiledCall(function, at)
                    at += len(each)
                self._kept += [array, words]
                program_bytes += ctypes.sizeof(array) + ctypes.sizeof(words)
                steps.append(partial(library.replay, ctypes.addressof(array), len(array)))
            else:
                steps += run
        num_bytes = self._kept_bytes + self._memory.held_bytes()
        return CpuGraph(steps, kept=self._kept, num_bytes=num_bytes, program_bytes=program_bytes)


def _repeats(operation: Callable, arguments: Sequence[Any]) -> bool:
    """Whether the arguments are replayable: tensors or None only; ``torch.cat`` takes its tensors as one list."""
    return _are_tensors(*arguments) if operation is torch.cat and len(arguments) == 1 else _are_tensors(arguments)


def _are_tensors(arguments: Iterable[object]) -> bool:
    """Whether all arguments are tensors or None: a number may differ in the next step."""
    return all(argument is None or isinstance(argument, torch.Tensor) for argument in arguments)


def _is_view(operation: Callable, out: torch.Tensor, arguments: Sequence[Any]) -> bool:
    """Whether the result is a view of the first argument, and the operation did not write to it."""
    name = operation.__name__
    writes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))  # __iadd__, add_
    if writes or not arguments or not isinstance(arguments[0], torch.Tensor):
        return False
    return out.untyped_storage().data_ptr() == arguments[0].untyped_storage().data_ptr()
