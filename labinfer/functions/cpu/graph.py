"""Graphs of compiled calls: a step makes hundreds of short ones, and Python takes as long as many of them."""

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

from labinfer.functions.cpu.library import Library
from labinfer.functions.cpu.step_memory import StepMemory

logger = logging.getLogger(__name__)

Tensor = torch.Tensor
NEW_MEMORY = {torch.empty, torch.empty_like, Tensor.new_empty}
"""Operations that need not be done again."""
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
"""Operations that layers have between functions, and how to do them again; all others but views make a graph impossible."""
FIXED = {"dim", "approximate"}
"""Named arguments of these that are the same in every step."""
# An operation that is not torch's has the attribute ``repeats_in_place`` where a second call with the same tensors is the way.
LARGE_BYTES = 1 << 16
"""Results of at least so many bytes keep their block if no earlier step had it; smaller ones are copied."""
FACTS = {"data_ptr", "stride", "dim", "size", "__len__", "__get__"}
"""Methods that give no tensor, nor what is in one; the last are properties, such as shapes."""


class CompiledCall(ctypes.Structure):
    """A call as replay.cpp has it."""

    _fields_ = [("function", ctypes.c_void_p), ("words", ctypes.c_void_p)]


class CpuGraph:
    """Compiled calls with torch's operations between them.

    Args:
        kept: objects whose memory the steps use.
        num_bytes: see ``functions.graph.Graph``.
        program_bytes: see there.
    """

    def __init__(
        self, steps: Iterable[Callable[[], object]], *, kept: Sequence[object], num_bytes: int, program_bytes: int
    ):
        self._steps, self._kept = tuple(steps), kept
        self.num_bytes, self.program_bytes = num_bytes, program_bytes

    def replay(self) -> None:
        for step in self._steps:
            step()


class CpuCapture:
    """Capture of compiled calls, see ``functions.graph.Capture``; it needs no dry run.

    Args:
        library: what it captures the calls of.
    """

    def __init__(self, library: Library):
        self._library, self.memory = library, StepMemory()

    def __call__(
        self, run: Callable[[], torch.Tensor], dry_run: Callable[[], torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, CpuGraph | None]:
        self.memory.begin_step()
        recording = _Recording(self.memory)
        self._library.observer = recording
        try:
            with recording:
                out = run()
        finally:
            self._library.observer = None
        if out is not None:  # as on some ranks of a stage
            out = recording.keep(out)
        if recording.obstacle:
            logger.debug("a step is run in Python: %s cannot be captured", recording.obstacle)
            return out, None
        return out, recording.graph(self._library)


class _Recording(TorchFunctionMode):
    """Writes down what is called while it is entered.

    Args:
        memory: blocks for tensors that are allocated meanwhile.
    """

    def __init__(self, memory: StepMemory):
        super().__init__()
        self.obstacle = ""
        """The first thing that cannot be done again."""
        self._memory = memory
        self._steps: list[tuple[int, bytes] | Callable[[], object]] = []
        """Compiled calls, as the addresses of functions with their arguments as ``replay.h`` reads them, and others."""
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
            if hasattr(argument, "_obj"):  # that is, by reference
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
        """A tensor like ``out`` in the memory of steps, or ``out`` itself if it is empty, not contiguous, or there is no room."""
        if out.numel() and out.is_contiguous():
            placed = self._memory.empty_like(out)
            if placed is not None:
                return placed
            self._stop_at("more memory than is left to steps")
        self._kept.append(out)
        self._kept_bytes += out.nbytes
        return out

    def _alias(self, argument: Any) -> Any:
        """An argument without what would keep the blocks of its tensors, or of those in it, from being given to others."""
        if isinstance(argument, torch.Tensor):
            return self._memory.alias(argument)
        return list(map(self._alias, argument)) if isinstance(argument, tuple | list) else argument

    def _stop_at(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle

    def keep(self, out: torch.Tensor) -> torch.Tensor:
        """The result, where no other step writes to it."""
        own = self._memory.take(out) if out.nbytes >= LARGE_BYTES else None
        if own is None:
            own = out.clone()
            self._steps.append(partial(own.copy_, self._alias(out)))
            out = own
        self._kept += [own, out]
        self._kept_bytes += own.nbytes - out.nbytes
        return out

    def graph(self, library: Library) -> CpuGraph:
        """Graph of what was done."""
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
    """Whether there is no argument that may be another one the next time; what is joined comes as one."""
    return _are_tensors(*arguments) if operation is torch.cat and len(arguments) == 1 else _are_tensors(arguments)


def _are_tensors(arguments: Iterable[object]) -> bool:
    """Whether there are tensors only, or nothing: a number may be another one the next time."""
    return all(argument is None or isinstance(argument, torch.Tensor) for argument in arguments)


def _is_view(operation: Callable, out: torch.Tensor, arguments: Sequence[Any]) -> bool:
    """Whether the result is another look at an argument's memory, which was not written to."""
    name = operation.__name__
    writes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))  # __iadd__, add_
    if writes or not arguments or not isinstance(arguments[0], torch.Tensor):
        return False
    return out.untyped_storage().data_ptr() == arguments[0].untyped_storage().data_ptr()
