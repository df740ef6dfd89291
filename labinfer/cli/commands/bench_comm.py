"""``launch.py bench comm``: latency and bandwidth of communication between the ranks of this launch, by message size and transport.

Measures the operations of a run: the all-reduce of a layer, the gather of logits, sending activations to the next rank,
and commands from rank 0. The transport is MPI under mpirun, and gloo (or the accelerator's library) under torchrun. For
ranks of one machine, shared memory is measured, too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from labinfer.base.errors import ExitStatus, UserError
from labinfer.cli.commands.session import Session
from labinfer.comm.communicator import Communicator
from labinfer.comm.control import ControlChannel
from labinfer.comm.shared_memory import share_memory
from labinfer.comm.shared_memory_ring import LARGEST_BYTES, share_rings
from labinfer.comm.spmd.command_senders import command_senders
from labinfer.comm.spmd.devices import carrier, resolve_devices, use_device
from labinfer.comm.spmd.topology import per_stage
from labinfer.launch.providers import collectives_backend
from labinfer.observe.output_file import STANDARD, OutputFile
from labinfer.observe.progress_line import START_SECONDS, Ticker
from labinfer.observe.table import format_bytes, format_table

SIZES = (64, 7 * 1024, 57 * 1024, 230 * 1024, 920 * 1024, 7 * 1024 * 1024)
"""Message sizes in bytes, from less than the activations of one token to those of a chunk of thousands of tokens (1.8 KB per token
for a 0.5B model in 16 bits)."""
SECONDS_PER_CASE = 0.3
MIN_ROUNDS, MAX_ROUNDS = 5, 2000


class Note(msgspec.Struct, frozen=True):
    """Test message on the control channel, with ``data`` of any size."""

    data: bytes


def run(session: Session) -> int:
    """Measure, and print one row for each operation and message size on rank 0."""
    group = session.join()
    with group.raise_on_all_ranks():
        if group.size < 2:
            raise UserError(
                "bench comm needs at least 2 ranks; start it with mpirun -n 2 or torchrun --nproc-per-node 2"
            )
        names = per_stage("--device", session.options.parallel.device, group.size, "rank")
        devices = resolve_devices(dict(enumerate(names)), group.everyone)
        device = use_device(devices[group.rank])
    everyone, on_cpus = [range(group.size)], all(name.type == "cpu" for name in devices.values())
    comm = group.comm.split(everyone, [collectives_backend(carrier(devices, group.everyone))])
    shared = share_memory(comm) if on_cpus else comm
    host, senders = group.comm.split(everyone), command_senders(range(group.size))
    messages = [(comm, ControlChannel(host, Note, Note, senders))]
    if on_cpus and len({info.node for info in group.everyone}) == 1:
        rings, commands = share_rings(host, [comm, host], group.ranks)
        if rings is not comm:
            messages.append((rings, ControlChannel(commands, Note, Note, senders)))
    with contextlib.ExitStack() as at_end:
        if group.rank == 0:
            at_end.callback(Ticker(lambda: "measuring", plain_seconds=START_SECONDS).close)
        rows = _measure(comm, shared, host, messages, device)
    if group.rank == 0:
        table = format_table(("call", "transport", "ranks", "size", "latency us", "GB/s"), rows)
        OutputFile(STANDARD).write(table + "\n")
    group.close()
    return ExitStatus.OK


def _measure(
    comm: Communicator,
    shared: Communicator,
    host: Communicator,
    messages: Sequence[tuple[Communicator, ControlChannel]],
    device: torch.device,
) -> list[tuple]:
    """Measure all operations. Returns the rows of the table.

    Args:
        comm: communicator of the launcher's transport.
        shared: communicator that uses shared memory within a machine; ``comm`` on accelerators.
        host: communicator for tensors in host memory.
        messages: pairs of communicator and control channel: one of the transport, and one of shared-memory rings (for small
            messages) if the ranks have such rings.
    """
    rows = []
    for size in SIZES:
        data = torch.zeros(size // 4, dtype=torch.float32, device=device)
        cases: list[tuple[str, str, Callable[[], None]]] = []
        for user, channel in messages if size < LARGEST_BYTES else messages[:1]:
            cases += [
                ("send (one way)", user.name, lambda data=data, user=user: _ping_pong(user, data)),
                ("command to all", user.name, lambda size=size, channel=channel: _command(channel, comm.rank, size)),
            ]
        for user in dict.fromkeys((comm, shared)):
            cases += [
                ("all-reduce", user.name, lambda data=data, user=user: user.all_reduce(data)),
                ("gather", user.name, lambda data=data, user=user: user.gather(data, [data.numel()] * user.size)),
            ]
        for name, transport, call in cases:
            seconds = _median_time(call, host, device)
            if name.startswith("send"):
                seconds /= 2
            rows.append(
                (name, transport, comm.size, format_bytes(size), round(seconds * 1e6), round(size / seconds / 1e9, 3))
            )
    return sorted(rows, key=lambda row: row[:2])


def _ping_pong(comm: Communicator, data: torch.Tensor) -> None:
    """Send ``data`` from rank 0 to the last rank and back. All other ranks do nothing."""
    last = comm.size - 1
    if comm.rank == 0:
        sent = comm.isend(data, last)
        comm.irecv(data, last).wait("the ping to come back")
        sent.wait("the ping to leave")
    elif comm.rank == last:
        comm.irecv(data, 0).wait("the ping")
        comm.isend(data, 0).wait("the pong to leave")


def _command(channel: ControlChannel, rank: int, size: int) -> None:
    """Send a command of ``size`` bytes from rank 0 to every rank, and collect a short acknowledgement from each."""
    if rank == 0:
        channel.broadcast(Note(bytes(size)))
        channel.collect()
    else:
        channel.receive()
        channel.reply(Note(b""))


def _median_time(call: Callable[[], None], comm: Communicator, device: torch.device) -> float:
    """Median time of ``call`` in seconds. Rank 0 times a few calls, and chooses the number of repetitions by them."""

    def complete() -> None:
        call()
        if device.type != "cpu":  # on accelerators, a call only enqueues work
            torch.accelerator.synchronize(device)

    comm.barrier()
    begin = time.perf_counter()
    for _ in range(3):
        complete()
    estimate = torch.tensor([(time.perf_counter() - begin) / 3], dtype=torch.float64)
    slowest = max(float(value) for value in comm.all_gather(estimate))
    rounds = int(min(MAX_ROUNDS, max(MIN_ROUNDS, SECONDS_PER_CASE / slowest)))
    comm.barrier()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        complete()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]
