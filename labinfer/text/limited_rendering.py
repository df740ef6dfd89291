"""LimitedEnvironment: a Jinja environment that renders chat templates within limits of time and memory. Templates are programs that
may loop forever or allocate gigabytes."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from resource import getpagesize
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

RENDER_SECONDS = 5.0
"""Maximum CPU time of rendering a template once, in seconds."""
RENDER_BYTES = 1 << 29
"""Maximum bytes by which the memory of the process may grow while a template is rendered. What other threads allocate counts,
too."""
GROWING_SECONDS = 0.05
"""Minimum CPU time, in seconds, after which a rendering can be the cause of grown memory: in less time it cannot have allocated
``RENDER_BYTES``."""
MAX_SIZE = 1 << 24
"""Maximum value of a number that is passed to a string method or a filter, and maximum length of a repeated string or list."""
MAX_BITS = 1 << 14
"""Maximum number of bits of an integer that a template computes."""
POLL_SECONDS = 0.02
"""Seconds between two checks of the CPU time and memory of a rendering."""
RETRY_SECONDS = 1.0
"""Seconds after which ``RenderingEnded`` is raised again in a rendering that goes on (a destructor may have swallowed the
exception)."""
Result = TypeVar("Result")
_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\d{8}|\*)|\{[^{}]*:[^{}]*(?:\d{8}|\{)")
"""Pattern of a format field whose width is huge or computed."""


class RenderingEnded(Exception):
    """The rendering of a template exceeded a limit; the message says which."""


class _LimitedCode(CodeGenerator):
    """Code generator that compiles the operator ``~`` to a call of ``environment.chain``, as Jinja's sandbox does not intercept
    ``~``."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.chain(context, (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(",")
        self.write("))")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja sandbox in which no single operation takes much time or memory. ``within_limits`` bounds the sum of all
    operations."""

    code_generator_class = _LimitedCode
    intercepted_binops = frozenset(
        ("+", "*", "**", "%")
    )  # operators that are not listed, Jinja also computes at compile time

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.filters = {name: limited(function) for name, function in self.filters.items()}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def chain(self, context: Any, operands: Sequence[Any]) -> str:
        """Concatenate ``operands``, as the operator ``~`` does."""
        _check_size(_num_characters(operands))
        return markup_join(operands) if context.eval_ctx.autoescape else str_join(operands)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the pieces of text of a block, a macro or the whole template."""
        parts = list(parts)
        _check_size(_num_characters(parts))
        return "".join(parts)

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # Jinja's sandbox wraps str.format
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_arguments(*arguments, *named.values())
            if "format" in function.__name__:
                _check_format(text, (arguments, named))
            arguments = _check_growth(function.__name__, text, arguments)
        return super().call(context, function, *arguments, **named)


def within_limits(render: Callable[[], Result]) -> Result:
    """Call ``render`` and return its result.

    Raises:
        RenderingEnded: the rendering exceeded the limit of CPU time or memory.
    """
    watch = _Watch()
    try:
        try:
            return render()
        finally:
            watch.stop()
    except RenderingEnded:
        raise RenderingEnded(watch.reason) from None


class _Watch:
    """Watchdog thread for the rendering in the thread that created it. Raises ``RenderingEnded`` in that thread if the rendering
    exceeds a limit."""

    def __init__(self) -> None:
        self.reason = ""
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._stopped, self._lock = threading.Event(), threading.Lock()
        # Read here, as the memory may have grown before the watchdog thread first runs.
        self._begin, self._memory = time.clock_gettime(self._clock), _own_bytes()
        threading.Thread(target=self._run, name="rendering", daemon=True).start()

    def stop(self) -> None:
        """Stop the watchdog thread. Afterwards it raises nothing in the rendering thread."""
        try:
            self._take_back()
        except RenderingEnded:  # raised just now; not raised again for ``RETRY_SECONDS``
            self._take_back()

    def _take_back(self) -> None:
        with self._lock:
            self._stopped.set()
        if self.reason:
            # This exception replaces a pending one, and is caught here. Clearing the pending one instead would leave the
            # interpreter looking for it at every call, and hang profilers and debuggers in Python 3.11.
            with suppress(RenderingEnded):
                _raise_in(self._thread)
                while True:
                    time.sleep(0)

    def _run(self) -> None:
        with suppress(OSError):  # the thread has ended
            while not self._stopped.wait(RETRY_SECONDS if self.reason else POLL_SECONDS):
                taken = time.clock_gettime(self._clock) - self._begin
                if taken > RENDER_SECONDS:
                    self._end(f"it takes more than {RENDER_SECONDS:g} s")
                elif taken > GROWING_SECONDS and _own_bytes() - self._memory > RENDER_BYTES:
                    self._end(f"it takes more than {RENDER_BYTES >> 20} MiB")

    def _end(self, reason: str) -> None:
        with self._lock:
            if not self._stopped.is_set():
                self.reason = reason
                _raise_in(self._thread)


def _raise_in(thread: int) -> None:
    """Raise ``RenderingEnded`` in the thread with the identifier ``thread``, wherever it is."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(RenderingEnded))


def _own_bytes() -> int:
    """Resident memory of this process in bytes; 0 if unknown."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
    return 0


def limited(function: Callable) -> Callable:
    """Wrap a Jinja filter (or string method) so that it refuses arguments that are huge numbers. Some filters also refuse huge
    results."""
    first = 1 + hasattr(
        function, "jinja_pass_arg"
    )  # index of the first argument after the context and the filtered value

    @wraps(function)  # also copies the attributes that Jinja sets
    def call(*arguments: Any, **named: Any) -> Any:
        context, text, rest = arguments[: first - 1], arguments[first - 1], arguments[first:]
        _check_arguments(*rest, *named.values())
        name = function.__name__.removeprefix("do_").removeprefix("sync_do_")
        if name == "format":
            _check_format(text, (rest, named))
        if name == "join":
            text = list(text)
            _check_join(text, next(iter((*rest, *named.values())), ""))
        elif name == "indent":
            _check_growth("replace", text, ("\n", next(iter((*rest, *named.values())), "")))
        else:
            _check_growth(name, text, (*rest, *named.values()))
        return function(*context, text, *rest, **named)

    return call


def _check_arguments(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_SIZE:
            raise SecurityError(f"a number above {MAX_SIZE}")


def _check_format(form: Any, values: Any) -> None:
    """Refuse a format string whose fields have a huge or computed width, or which would make a huge text of ``values``."""
    if not isinstance(form, str):
        return
    if _WIDTH.search(form):
        raise SecurityError(f"{form!r:.60} is too wide a form")
    _check_size((form.count("%") + form.count("{")) * _longest(values))


def _check_growth(name: str, text: Any, arguments: Sequence[Any]) -> Sequence[Any]:
    """Refuse a string method whose result would be huge. Returns the arguments, with lists in place of iterables that can be read
    only once."""
    if name == "join" and arguments:
        arguments = (list(arguments[0]), *arguments[1:])
        _check_join(arguments[0], text)
    elif name == "replace" and isinstance(text, str) and len(arguments) > 1 and all(map(_is_text, arguments[:2])):
        _check_size(len(text) + text.count(arguments[0]) * len(arguments[1]))
    return arguments


def _check_join(parts: list, separator: Any) -> None:
    _check_size(_num_characters(parts) + len(parts) * _longest(separator))


def _num_characters(parts: Iterable[Any]) -> int:
    """Total number of characters of the strings among ``parts``."""
    return sum(len(part) for part in parts if isinstance(part, str))


def _longest(values: Any) -> int:
    """Number of characters of the longest string in ``values``, which may be nested."""
    if isinstance(values, str):
        return len(values)
    if isinstance(values, dict):
        values = list(values.values())
    return max(map(_longest, values), default=0) if isinstance(values, (list, tuple)) else 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"a text of {size} characters")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse an arithmetic operation whose result would be huge."""
    if operator == "%":
        _check_format(left, right)
    elif operator == "+":
        if hasattr(left, "__len__") and hasattr(right, "__len__") and len(left) + len(right) > MAX_SIZE:
            raise SecurityError(f"a sum of more than {MAX_SIZE} elements")
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise SecurityError(f"a number of more than {MAX_BITS} bits")
    elif operator == "*":
        sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
        if all(isinstance(size, int) for size in sizes) and sizes[0] * sizes[1] > MAX_SIZE:
            raise SecurityError(f"a repetition of more than {MAX_SIZE} elements")
