"""Trial of the collectives and sends between two devices: two processes compare them with sums and copies on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

import labinfer
from labinfer.base.plugins import PLUGINS, PluginSource, describe_error
from labinfer.comm.communicator import Communicator
from labinfer.comm.progress import Progress
from labinfer.comm.spmd.devices import DeviceName, use_device
from labinfer.comm.torch_dist import TorchCommunicator
from labinfer.functions.trial import TOLERANCES, Finding, dtype_name
from labinfer.launch.providers import collectives_backend

SIZES = (1, 1009)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMIT = 60.0
"""Timeout in seconds of the two processes."""
RANKS = 2


class CollectivesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two processes, and the device type whose collectives it tries."""

    device_type: str
    rank: int
    store: str
    """File by which the processes meet."""
    plugins: list[PluginSource] = []


def try_collectives(device_type: str) -> list[Finding]:
    """Findings about the collectives between devices 0 and 1 of a type, or between two processes on CPUs."""
    command = [sys.executable, "-m", "labinfer.launch.collectives_trial"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        processes = []
        for rank in range(RANKS):
            process = subprocess.Popen(
                command,
                cwd=Path(labinfer.__file__).parent.parent,  # so that the process finds this package
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            request = CollectivesRequest(
                device_type=device_type, rank=rank, store=os.path.join(folder, "store"), plugins=PLUGINS.loaded
            )
            process.stdin.write(msgspec.json.encode(request))
            process.stdin.close()
            process.stdin = None  # else ``communicate`` flushes it
            processes.append(process)
        verdict, detail, output = "", "", b""
        try:
            output, _ = processes[0].communicate(timeout=LIMIT)
            statuses = [process.wait(LIMIT) for process in processes]
            if any(statuses):
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                verdict, detail = "crashes", f"exit codes {statuses[0]} and {statuses[1]} {''.join(said[-1:]):.200}"
        except subprocess.TimeoutExpired as error:
            output, verdict, detail = error.stdout or b"", "hangs", f"no end within {LIMIT:g} s"
        finally:
            for process in processes:
                process.kill()
                process.wait()
                process.stdout.close()
    findings = [msgspec.json.decode(line, type=Finding) for line in output.split(b"\n")[:-1]]
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
    if not error <= TOLERANCES[dtype.itemsize]:
        return make_finding(call_name, name, dtype, "wrong", f"differs by {error:.2g} of the largest number")
    return make_finding(call_name, name, dtype, "works")


def main() -> None:
    """Read a ``CollectivesRequest`` from standard input; rank 0 writes one finding per line to standard output."""
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
