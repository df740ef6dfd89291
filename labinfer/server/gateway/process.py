"""GatewayProcess: rank 0's hold on the gateway process."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

import labinfer
from labinfer.base.errors import BrokenConnection, UserError
from labinfer.base.plugins import PLUGINS
from labinfer.comm.spmd.environment import SupervisorAddress
from labinfer.server.gateway.options import BACKLOG, ServerOptions, Setup
from labinfer.server.link import local_socket
from labinfer.server.link.private_directory import private_directory

GATEWAY = "labinfer.server.gateway.main"
END_SECONDS = 6.0
"""The process may take so long for its last words."""
DEATH_SECONDS = 0.5
"""From a connection that breaks to the end of the process that had it."""


def listen(options: ServerOptions) -> socket.socket:
    """The socket on which clients come. The folder of files is tried too, as ranks would learn of it only after loading.

    Raises:
        UserError: the address is taken, or none of this machine's; or the folder cannot be used.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    is_for_both = options.host == "::" and socket.has_dualstack_ipv6()  # as other servers take it
    try:
        listener = socket.create_server(
            (options.host, options.port), family=family, backlog=BACKLOG, dualstack_ipv6=is_for_both
        )
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while attempting")[0]  # Python adds the address once more
        raise UserError(
            f"cannot listen on {options.host} port {options.port}: {reason}; choose another --port or --host"
        ) from None
    if options.files_dir:
        from labinfer.server.gateway.file_store import lock_folder  # most servers have none

        try:
            # The gateway of a server that died may still be at its last words.
            os.close(lock_folder(Path(options.files_dir), END_SECONDS))
        except UserError:
            listener.close()
            raise
    return listener


class GatewayProcess:
    """A gateway that this process starts, is the host of, and takes with it.

    The host connects before the process is there, so that its end is noticed from the first moment on. The name of the
    local socket is gone then: nobody else is to come.

    Args:
        listener: for clients; bound and listening.
        cpus: cores it may run on; this process may have bound itself to fewer.
        fault_timeout: seconds without a sign of life of its host.

    Raises:
        UserError: there is no place for a local socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        options: ServerOptions,
        model_names: list[str],
        cpus: list[int],
        *,
        log_level: str,
        fault_timeout: float,
    ):
        setup = Setup(
            options=options,
            model_names=model_names,
            cpus=cpus,
            log_level=log_level,
            token=secrets.token_hex(16),
            fault_timeout=fault_timeout,
            plugins=PLUGINS.loaded,
        )
        with private_directory() as directory:
            hosts = local_socket.listen(directory)
            with hosts, listener:
                self.connection = local_socket.connect(directory, setup.token, model_names)
                self._process = start_gateway(setup, hosts, listener)

    def explain(self, error: BrokenConnection) -> BrokenConnection:
        """An error that says how the process ended, or ``error`` where it goes on."""
        try:
            status = self._process.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            return error
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"
        return BrokenConnection(f"the gateway process {how}; the server ends")

    def kill(self) -> None:
        """End it at once: one that is stopped takes no other signal."""
        self._process.kill()

    def end(self) -> None:
        """Wait for its end; it comes when the connection closes."""
        self.connection.close()
        await_end(self._process)


class SupervisorsGateway:
    """A gateway that a supervisor started, and that goes on without this process.

    Raises:
        UserError: it is not there.
    """

    def __init__(self, supervisor: SupervisorAddress, model_names: list[str]):
        try:
            self.connection = local_socket.connect(Path(supervisor.directory), supervisor.token, model_names)
        except BrokenConnection as error:
            raise UserError(f"{error}; rank 0 must run on the machine of launch.py supervise") from None

    def explain(self, error: BrokenConnection) -> BrokenConnection:
        """``error``: its supervisor says more."""
        return error

    def kill(self) -> None:
        """Leave it to its supervisor, which looks after it when the ranks have ended."""

    def end(self) -> None:
        """Hang up."""
        self.connection.close()


def await_end(process: subprocess.Popen) -> None:
    """Wait for the end of a gateway process whose last host has gone, and kill it where that takes too long."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def start_gateway(
    setup: Setup, hosts: socket.socket, listener: socket.socket, beats: int | None = None
) -> subprocess.Popen:
    """Start a gateway process.

    Args:
        hosts: the local socket on which it takes in hosts.
        listener: the socket on which it takes in clients.
        beats: the descriptor of a pipe, into which it writes signs of life.
    """
    descriptors = (hosts.fileno(), listener.fileno(), *([] if beats is None else [beats]))
    # Inherited: Ctrl-C is not for the gateway, from its first moment on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", GATEWAY, *map(str, descriptors)],
            pass_fds=descriptors,
            cwd=Path(labinfer.__file__).parent.parent,  # so that it finds this package
            stdin=subprocess.PIPE,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        with process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(setup))
    except BrokenPipeError:
        pass  # it has ended: whoever reads from it learns of that
    return process
