"""RankGroup: this rank's membership in its group (transport, health channel, information on all ranks)."""

from __future__ import annotations

import functools
import logging
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import msgspec
import torch

from labinfer.base.config import EngineOptions, ParallelOptions, RuntimeOptions
from labinfer.base.errors import CollectiveError, UserError, first_line
from labinfer.base.plugins import PLUGINS, share_plugins
from labinfer.comm.communicator import Communicator
from labinfer.comm.group.signals import die_with_launcher
from labinfer.comm.group.time_limits import time_limit_for_joining, time_limit_for_leaving
from labinfer.comm.health_channel import FaultOptions, HealthChannel
from labinfer.comm.health_server import HealthServer
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.progress import Progress
from labinfer.comm.spmd.addresses import addresses_towards, bracketed, ephemeral_ports, interfaces
from labinfer.comm.spmd.end_launcher import end_launcher
from labinfer.comm.spmd.environment import LaunchEnvironment, choose_gloo_interface, choose_mpi_ports, make_portable
from labinfer.comm.spmd.machine import RankInfo, describe_rank
from labinfer.comm.spmd.processes import mpi_launcher_began
from labinfer.comm.spmd.threads import ThreadChoice, bind, choose_threads, is_oversubscribed

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
"""Time that rank 0 waits for the health channels of ranks that have already joined the transport; at most ``--timeout``."""


class Rendezvous(msgspec.Struct, frozen=True):
    """Address of rank 0's health channel, and the secret that authenticates the other ranks."""

    addresses: list[str]
    port: int
    key: str
    node: str
    refusal: str = ""
    """Reason why rank 0 cannot listen for connections; empty if it can."""


@dataclass(kw_only=True)
class RankGroup:
    """All ranks of a launch, or only the ranks that run a model, as seen by this rank."""

    environment: LaunchEnvironment
    comm: Communicator
    """Communicator of the group. It counts ranks from 0, so its ranks differ from ``ranks`` if some are left out."""
    ranks: tuple[int, ...]
    """World ranks of the group."""
    progress: Progress
    health_channel: HealthChannel | None
    everyone: list[RankInfo]
    """All ranks of the launch."""
    threads: ThreadChoice = ThreadChoice(1, "not chosen yet")
    made: list[Communicator] = field(default_factory=list)
    """Communicators that ``split`` made, in one order on all ranks; they are closed with the group."""

    @property
    def rank(self) -> int:
        return self.ranks[self.comm.rank]

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def num_sharing_memory(self) -> int:
        """Number of ranks that share this rank's host memory, including this rank."""
        return sum(info.memory == self.everyone[self.rank].memory for info in self.everyone)

    @property
    def is_first_on_node(self) -> bool:
        """Whether this rank is the lowest of its node, which does the work that is needed once on every node."""
        before = self.ranks[: self.comm.rank]
        return all(self.everyone[rank].node != self.everyone[self.rank].node for rank in before)

    def only(self, ranks: Sequence[int]) -> RankGroup:
        """Group of ``ranks`` (ascending); collective over this group. Each remaining rank gets a group of one."""
        groups = [tuple(ranks), *((rank,) for rank in self.ranks if rank not in ranks)]
        return replace(self, comm=self.split(groups), ranks=next(group for group in groups if self.rank in group))

    def split(self, groups: Sequence[Sequence[int]], backends: Sequence[str] = ()) -> Communicator:
        """Communicator that is closed with this group; see ``Communicator.split``."""
        comm = self.comm.split(groups, backends)
        self.made.append(comm)
        return comm

    def refuse_spares(self, ranks: Sequence[int]) -> None:
        """Refuse ``--ranks`` values that leave out ranks, for a command that needs all of them.

        Raises:
            UserError: ``ranks`` is not empty and lacks a rank.
        """
        if ranks and len(set(ranks)) < self.size:
            raise UserError(
                f"--ranks names {len(set(ranks))} of {self.size} ranks, but this command runs on all ranks; leave "
                "it out"
            )

    def gather_bytes(self, data: bytes) -> dict[int, bytes]:
        """Gather ``data`` of every rank, by world rank; collective."""
        return dict(zip(self.ranks, self.comm.all_gather_bytes(data), strict=True))

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Run a check on every rank. If it raises a UserError on any rank, it raises on all ranks, so that none waits
        for the others.

        Raises:
            CollectiveError: the error of the lowest rank that failed.
        """
        complaint = ""
        try:
            yield
        except UserError as error:
            complaint = str(error)
        with self.progress.without_limit():  # another rank may be downloading, or reading from a slow disk
            complaints = self.gather_bytes(complaint.encode(errors="backslashreplace"))
        for rank, text in complaints.items():
            if text:
                where = f"rank {rank} on {self.everyone[rank].node}: " if rank else ""
                raise CollectiveError(where + text.decode()) from None

    def load_plugins(self, names: Sequence[str]) -> None:
        """Load plugins on every rank; collective. Rank 0 sends the contents of plugin files, and the ranks compare each plugin's digest.

        Raises:
            CollectiveError: a plugin is missing on a rank, differs from rank 0's, or raises.
        """
        with self.raise_on_all_ranks():
            sources = share_plugins(names, self.rank, self.comm.all_gather_bytes, self._describe_rank)
        with self.raise_on_all_ranks():
            PLUGINS.load(sources)

    def _describe_rank(self, rank: int) -> str:
        return f"rank {rank} on {self.everyone[rank].node}"

    def fail(self, text: str, investigate: bool = False) -> None:
        """Tell the other ranks that this rank is about to exit because of a failure, described by ``text``; see ``Failure``."""
        if self.health_channel is not None:
            self.health_channel.fail(text, investigate)

    def take_cores(self, ranks: Sequence[int], threads: int) -> None:
        """Divide the machine's cores among its working ranks, and bind this rank to its share.

        Args:
            ranks: working ranks, besides this one; empty for all ranks.
            threads: ``--threads``; 0 if not given.
        """
        mine = self.everyone[self.rank]
        working = [info for info in self.everyone if info == mine or not ranks or info.rank in ranks]
        environment, was_bound = self.environment, bool(self.threads.bound_to)
        self.threads = choose_threads(mine, working, threads, environment.omp_num_threads, environment.omp_forced)
        if self.threads.bound_to or was_bound:  # before torch starts its threads; existing threads are moved, too
            bind(self.threads.bound_to or mine.cpus)
        torch.set_num_threads(self.threads.count)
        self.progress.oversubscribed = is_oversubscribed(working, mine.node)

    def end_splits(self) -> None:
        """Close all communicators that were split off; collective. No transfer may be pending."""
        for comm in reversed(self.made):
            comm.close()
        self.made.clear()

    def close(self, patient: bool = False) -> None:
        """Leave the group without an error; collective. Closes split-off communicators. The transport ends with the process, as another
        LLM may use it until then.

        Args:
            patient: whether to wait for the other ranks without a timeout, as a spare rank does while they work.
        """
        if self.health_channel is not None:
            with self.progress.without_limit() if patient else nullcontext():
                self.comm.barrier()
            self.end_splits()
            self.health_channel.close()


def join_group(environment: LaunchEnvironment, options: EngineOptions, plugins: Sequence[str] = ()) -> RankGroup:
    """Join the other ranks, agree on the transport, open the health channels and bind this rank to its share of the cores.

    Args:
        plugins: values of ``--plugin``, for ``RankGroup.load_plugins``.

    Raises:
        UserError: the launcher does not support the transport, the ranks cannot meet, or the ranks have different plugins.
    """
    if options.model.reproducible == "any-cpu":
        make_portable()
    die_with_launcher(environment)
    parallel, runtime = options.parallel, options.runtime
    progress = Progress(rank=environment.rank, label=f"rank {environment.rank}", timeout=runtime.timeout)
    own = interfaces()
    mine = describe_rank(
        environment.rank,
        environment.local_rank,
        environment.node_name,
        list(own),
        plugins,
        uses_accelerator=any(device != "cpu" for device in parallel.device),
    )
    with time_limit_for_joining(environment, runtime.timeout):
        comm = _join_transport(environment, parallel, runtime, progress=progress, mine=mine, own=own)
    everyone = [
        msgspec.msgpack.decode(data, type=RankInfo) for data in comm.all_gather_bytes(msgspec.msgpack.encode(mine))
    ]
    for info in everyone:
        if info.plugins != everyone[0].plugins:
            given, first = (" ".join(names) or "none" for names in (info.plugins, everyone[0].plugins))
            raise UserError(
                f"rank {info.rank} on {info.node} has --plugin {given}, but rank 0 has {first}; give the same to "
                "all ranks"
            )
    faults = FaultOptions(
        timeout=runtime.fault_timeout,
        hosts=[info.node for info in everyone],
        local_pids={
            info.rank: info.pid
            for info in everyone
            if info.node == mine.node and mine.pid_space == info.pid_space != "" and info != mine
        },
        end_launcher=end_launcher if environment.uses_mpi else lambda: "",
    )
    group = RankGroup(
        environment=environment,
        comm=comm,
        ranks=tuple(range(comm.size)),
        progress=progress,
        health_channel=None,
        everyone=everyone,
    )
    group.take_cores(options.working_ranks, runtime.threads)
    if comm.size > 1:
        group.health_channel = _open_health_channel(comm, everyone, progress, faults, runtime)
    return group


def _join_transport(
    environment: LaunchEnvironment,
    parallel: ParallelOptions,
    runtime: RuntimeOptions,
    *,
    progress: Progress,
    mine: RankInfo,
    own: Mapping[str, str],
) -> Communicator:
    """Join the transport of the group.

    Args:
        own: interfaces of this machine, by address.

    Raises:
        UserError: see ``join_group``.
    """
    if environment.uses_mpi:
        return _join_mpi(environment, parallel, runtime, progress=progress, mine=mine, own=own)
    if parallel.transport == "mpi" and environment.launcher != "single":
        raise UserError(f"--transport mpi needs mpirun or mpiexec; the launcher is {environment.launcher}")
    if environment.world_size == 1:
        return LocalCommunicator(progress)
    from labinfer.comm.torch_dist import TorchCommunicator

    # torchrun's agent hosts the store, which env:// finds. Without torchrun, rank 0 hosts it.
    address = (
        "env://"
        if environment.launcher == "torchrun"
        else f"tcp://{bracketed(environment.master_addr)}:{environment.master_port}"
    )
    if not environment.is_one_node and environment.rank == 0:
        _warn_about_ports(runtime)
    return TorchCommunicator.join(
        progress,
        address,
        environment.rank,
        environment.world_size,
        place=f"{bracketed(environment.master_addr)}:{environment.master_port}",
        own_addresses=None if environment.is_one_node else mine.addresses,
        choose_interface=functools.partial(_listen_on_routes, own),
    )


def _join_mpi(
    environment: LaunchEnvironment,
    parallel: ParallelOptions,
    runtime: RuntimeOptions,
    *,
    progress: Progress,
    mine: RankInfo,
    own: Mapping[str, str],
) -> Communicator:
    choose_mpi_ports(runtime.ports)
    try:
        from labinfer.comm import mpi
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"started by {environment.launcher} ({environment.decided_by}), but mpi4py cannot be imported: "
            f"{first_line(error)}; pip install mpi4py {environment.launcher}"
        ) from None
    if environment.launcher == "mpich":
        mpi.check_shared_memory(environment.local_world_size, mpi_launcher_began())
    leaving = functools.partial(time_limit_for_leaving, environment, runtime.fault_timeout)
    comm = mpi.join_world(progress, environment.launcher, environment.world_size, leaving)
    wants_accelerator = any(device != "cpu" for device in parallel.device) and bool(mine.accelerator)
    someone_has_accelerator = any(comm.all_gather_bytes(b"1" if wants_accelerator else b""))
    mpi.forget_segments()
    if parallel.transport == "mpi" or (parallel.transport == "auto" and not someone_has_accelerator) or comm.size == 1:
        return comm
    from labinfer.comm.listening import free_port
    from labinfer.comm.torch_dist import TorchCommunicator

    data = comm.all_gather_bytes(msgspec.msgpack.encode(mine.addresses))
    peers = [msgspec.msgpack.decode(addresses, type=list[str]) for addresses in data]
    _listen_on_routes(own, peers)
    host = _reachable_addresses(mine.addresses, peers)[0]
    address = f"tcp://{bracketed(host)}:{free_port(runtime.ports)}"
    address = comm.all_gather_bytes(address.encode())[0].decode()
    return TorchCommunicator.join(progress, address, comm.rank, comm.size)


def _open_health_channel(
    comm: Communicator, everyone: list[RankInfo], progress: Progress, faults: FaultOptions, runtime: RuntimeOptions
) -> HealthChannel:
    server, data, mine = None, b"", everyone[comm.rank]
    if comm.rank == 0:
        key = secrets.token_hex(16)
        addresses = _reachable_addresses(mine.addresses, [info.addresses for info in everyone])
        try:
            server = HealthServer(comm.size - 1, key, runtime.ports)
            offer = Rendezvous(addresses, server.port, key, mine.node)
        except UserError as error:
            offer = Rendezvous([], 0, "", mine.node, str(error))
        except OSError as error:  # such as no free file descriptor
            refusal = f"rank 0 on {mine.node} cannot listen for the other ranks: {error.strerror or error}"
            offer = Rendezvous([], 0, "", mine.node, refusal)
        data = msgspec.msgpack.encode(offer)
    rendezvous = msgspec.msgpack.decode(comm.all_gather_bytes(data)[0], type=Rendezvous)
    if rendezvous.refusal:
        raise UserError(rendezvous.refusal)
    timeout = min(CONNECT_SECONDS, runtime.timeout)
    if server is not None:
        return server.accept_all(timeout, progress.describe, faults=faults)
    addresses = (["127.0.0.1"] if rendezvous.node == mine.node else []) + rendezvous.addresses
    return HealthChannel.connect(
        rank=comm.rank,
        addresses=addresses,
        port=rendezvous.port,
        key=rendezvous.key,
        timeout=timeout,
        describe=progress.describe,
        faults=faults,
    )


def _reachable_addresses(own: list[str], peers: list[list[str]]) -> list[str]:
    """Addresses and host name of this machine, those on the routes to the peers first."""
    towards = addresses_towards(peers, own)
    return [*towards, *(address for address in own if address not in towards), socket.gethostname()]


def _listen_on_routes(own: Mapping[str, str], peers: list[list[str]]) -> str:
    """Bind gloo to an interface that the peers can reach. Returns a text that describes the choice.

    Args:
        own: interfaces of this machine, by address.
        peers: addresses of every rank's machine.
    """
    towards = addresses_towards(peers, list(own))
    if not towards:  # all ranks are on this machine, or no route exists
        return f"no route to the other ranks from {', '.join(own) or 'a machine without addresses'}"
    choose_gloo_interface(own[towards[0]])
    ports = ephemeral_ports()
    listens = f"; gloo listens on ports {ports[0]}-{ports[-1]}, which a firewall may block" if ports else ""
    return f"this host connects to the others from {towards[0]} on {own[towards[0]]}{listens}"


def _warn_about_ports(runtime: RuntimeOptions) -> None:
    """Warn that ``--port-range`` does not apply to gloo, unless the system's ephemeral ports lie within the range."""
    given, ephemeral = runtime.ports, ephemeral_ports()
    if given and ephemeral and not (given[0] <= ephemeral[0] and ephemeral[-1] <= given[-1]):
        logger.warning(
            "warning: --port-range %s applies to the health channel only; gloo listens on the ephemeral ports %d-%d: open these too, or "
            'set sysctl net.ipv4.ip_local_port_range="%d %d"',
            runtime.port_range,
            ephemeral[0],
            ephemeral[-1],
            given[0],
            given[-1],
        )
