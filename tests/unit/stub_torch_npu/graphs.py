"""``torch_npu.npu``: streams and graphs, which record torch's operations on the CPU and run them again."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

utils = SimpleNamespace(get_cann_version={"CANN": "9.1.0", "DRIVER": "25.5.0"}.__getitem__)
_recording: list[NPUGraph] = []
"""The graph that is recorded, if any."""


def get_device_name(device):
    return "Ascend910B"


def get_sync_debug_mode():
    return 0


def set_sync_debug_mode(mode):
    pass


def graph_pool_handle():
    return object()


class Stream:
    def __init__(self, device):
        self.device = device


class NPUGraph:
    """Recorded operations; those of ``updatable`` functions with arguments that ``update`` replaces."""

    def __init__(self):
        self.calls = []
        self.updatable_calls = []
        self.auto_dispatch_capture = False

    def update(self, cpu_update_input):
        if not self.auto_dispatch_capture:
            raise RuntimeError("The current graph configuration does not support update")
        if len(cpu_update_input) == 1:
            cpu_update_input = cpu_update_input * len(self.updatable_calls)
        if len(cpu_update_input) != len(self.updatable_calls):
            raise RuntimeError("as many updates as operators")
        for named, update in zip(self.updatable_calls, cpu_update_input, strict=True):
            named.update({key: value for key, value in update.items() if key in named})

    def replay(self):
        for function, arguments, named, out in self.calls:
            _copy(out, function(*arguments, **named), arguments)


class _Recorder(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        _recording[-1].calls.append((function, args, kwargs or {}, out))
        return out


@contextmanager
def graph(npu_graph, pool=None, stream=None, auto_dispatch_capture=False, capture_error_mode="global"):
    assert (
        isinstance(stream, Stream) and pool is not None and capture_error_mode in ("global", "thread_local", "relaxed")
    )
    npu_graph.auto_dispatch_capture = auto_dispatch_capture
    _recording.append(npu_graph)
    try:
        with _Recorder():
            yield
    finally:
        _recording.pop()


def updatable(function):
    """Make ``function`` one recorded call, whose arguments by name ``NPUGraph.update`` may replace."""

    @wraps(function)
    def call(*arguments, **named):
        if not _recording:
            return function(*arguments, **named)
        with _disable_current_modes():
            out = function(*arguments, **named)
        _recording[-1].updatable_calls.append(named)
        _recording[-1].calls.append((function, arguments, named, out))
        return out

    return call


def _copy(out, new, arguments):
    """Put the result of a repeated operation into the tensors of the recorded one, unless they are views of its arguments."""
    if isinstance(out, (tuple, list)):
        for old, tensor in zip(out, new, strict=True):
            _copy(old, tensor, arguments)
        return
    if not isinstance(out, torch.Tensor):
        return
    storages = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
    if out.untyped_storage().data_ptr() not in storages:
        out.copy_(new)
