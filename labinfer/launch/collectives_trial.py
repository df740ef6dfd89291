"""Trial of the collectives and sends between two devices: two processes compare them with sums and copies on the CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from labinfer.base.plugins import PLUGINS, PluginSource, describe_error
from labinfer.comm.communicator import Communicator
from labinfer.comm.group.signals import die_with_parent
from labinfer.comm.progress import Progress
from labinfer.comm.spmd.devices import DeviceName, use_device
from labinfer.comm.torch_dist import TorchCommunicator
from labinfer.functions.trial import Finding, dtype_name
from labinfer.functions.trial_results import dtype_tolerance
from labinfer.launch.json_child import JsonChild
from labinfer.launch.providers import collectives_backend

SIZES = (1, 1009)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMIT = 60.0
"""Timeout in seconds of the two processes that try the collectives."""
RANKS = 2


class CollectivesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to one of the two processes that try the collectives: its rank, and the device type whose collectives to try."""

    device_type: str
    rank: int
    store: str
    """File through which the two processes find each other."""
    plugins: list[PluginSource] = []


def try_collectives(device_type: str) -> list[Finding]:
    """Findings about the collectives between devices 0 and 1 of a type, or between two processes on CPUs."""
    verdict, detail, lines = "", "", []
    deadline = time.monotonic() + LIMIT
    with contextlib.ExitStack() as stack:
        store = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "store")
        try:
            children = []
            for rank in range(RANKS):
                request = CollectivesRequest(device_type=device_type, rank=rank, store=store, plugins=PLUGINS.loaded)
                children.append(stack.enter_context(JsonChild("labinfer.launch.collectives_trial", request)))
            lines += children[0].lines(deadline)
            codes = [child.exit_code(deadline) for child in children]
            if None in codes:
                verdict, detail = "hangs", f"no end within {LIMIT:g} s"
            elif any(codes):
                said = next(filter(None, (child.last_error() for child in children)), "")
                verdict, detail = "crashes", f"exit codes {codes[0]} and {codes[1]} {said:.200}"
        except OSError as error:
            verdict, detail = "crashes", str(error)
    findings = [msgspec.json.decode(line, type=Finding) for line in lines]
    failed = make_finding("collectives", device_type, DTYPES[0], verdict, detail)
    return [*findings, failed] if verdict else findings


def make_finding(call: str, name: str, dtype: torch.dtype, verdict: str, detail: str = "") -> Finding:
    """Finding about one collective.

    Args:
        name: backend, or device type.
    """
    return Finding(
        function=call,
        name=name,
        quantization="none",
        dtype=dtype_name(dtype),
        kv_dtype=dtype_name(dtype),
        rows=RANKS,
        verdict=verdict,
        detail=detail,
    )


def run_collectives(comm: Communicator, device: torch.device) -> Iterator[Finding]:
    """Try every collective and send of ``comm`` between two ranks, with tensors on ``device``."""
    for dtype in DTYPES:
        for size in SIZES:
            parts = [
                torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(RANKS)
            ]
            own, peer = parts[comm.rank].to(device), 1 - comm.rank
            landing = torch.empty_like(own)

            def exchange(own=own, peer=peer, landing=landing) -> torch.Tensor:
                receive, send = comm.irecv(landing, peer), comm.isend(own, peer)
                receive.wait("the peer's tensor")
                send.wait("the peer to receive")
                return landing

            right_sum = (parts[0].float() + parts[1].float()).to(dtype)
            calls: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {
                "all_reduce": (lambda own=own: comm.all_reduce(own.clone()), right_sum),
                "all_gather": (lambda own=own: torch.stack(list(comm.all_gather(own))), torch.stack(parts)),
                "send": (exchange, parts[peer]),
            }
            for name, (call, right) in calls.items():
                yield _try_call(name, comm.name, dtype, call, right)


def _try_call(
    call_name: str, name: str, dtype: torch.dtype, call: Callable[[], torch.Tensor], right: torch.Tensor
) -> Finding:
    try:
        got = call().cpu()
    except Exception as error:  # noqa: BLE001 - a vendor's library raises whatever it raises
        return make_finding(call_name, name, dtype, "raises", describe_error(error))
    error = float((got.double() - right.double()).abs().max() / right.double().abs().max())
    if not error <= dtype_tolerance(dtype):
        return make_finding(call_name, name, dtype, "wrong", f"differs by {error:.2g} of the largest number")
    return make_finding(call_name, name, dtype, "works")


def main() -> None:
    """Read a ``CollectivesRequest`` from standard input; rank 0 writes one finding per line to standard output."""
    die_with_parent(signal.SIGKILL)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=CollectivesRequest)
    output = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    PLUGINS.load(request.plugins)
    is_cpu = request.device_type == "cpu"
    device = use_device(DeviceName("cpu") if is_cpu else DeviceName(request.device_type, request.rank))
    progress = Progress(rank=request.rank, timeout=LIMIT / 2)
    world = TorchCommunicator.join(progress, f"file://{request.store}", request.rank, RANKS)
    comm = world.split([range(RANKS)], [collectives_backend(request.device_type)])
    for finding in run_collectives(comm, device):
        if request.rank == 0:
            os.write(output, msgspec.json.encode(finding) + b"\n")
    world.all_reduce(torch.ones(1))  # the store must outlive the other process
    os._exit(0)  # without destructors, which may crash in a vendor's library


if __name__ == "__main__":
    main()
