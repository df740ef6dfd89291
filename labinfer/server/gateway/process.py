"""GatewayProcess: a gateway process that rank 0 starts and ends."""

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
"""Seconds in which the gateway process may finish its responses before it is killed."""
EXIT_DELAY_SECONDS = 0.5
"""Seconds to wait for the exit of the gateway process after its connection broke."""


def listen(options: ServerOptions) -> socket.socket:
    """Open the listening socket for clients. Also checks the folder of ``--files-dir``, so that an error shows before
    models are loaded.

    Raises:
        UserError: the address is in use, or is not an address of this machine; or the folder of ``--files-dir`` cannot be used.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    is_for_both = options.host == "::" and socket.has_dualstack_ipv6()  # "::" also accepts IPv4, as in other servers
    try:
        listener = socket.create_server(
            (options.host, options.port), family=family, backlog=BACKLOG, dualstack_ipv6=is_for_both
        )
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while attempting")[0]  # Python adds the address again
        raise UserError(
            f"cannot listen on {options.host} port {options.port}: {reason}; choose another --port or --host"
        ) from None
    if options.files_dir:
        from labinfer.server.gateway.file_store import lock_folder  # imported here, as most servers store no files

        try:
            # waits: the gateway of a server that died may still be finishing responses
            os.close(lock_folder(Path(options.files_dir), END_SECONDS))
        except UserError:
            listener.close()
            raise
    return listener


class GatewayProcess:
    """A gateway process that this process (rank 0, the engine host) starts, and the connection to it.

    This process connects to the gateway's socket before it starts the gateway, so that the gateway notices if this process dies.
    Then it removes the name of the socket, so that no other process can connect.

    Args:
        listener: bound and listening socket for clients.
        cpus: CPU cores that the gateway may use; this process may be bound to a part of them.
        fault_timeout: seconds without a heartbeat until a peer is considered dead.

    Raises:
        UserError: no directory can hold a local socket.
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
        """Return an error that explains a broken connection by the gateway's exit status; ``error`` itself if the
        gateway still runs."""
        try:
            status = self._process.wait(EXIT_DELAY_SECONDS)
        except subprocess.TimeoutExpired:
            return error
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return BrokenConnection(f"the gateway process {how}; shutting down")

    def kill(self) -> None:
        """Kill the gateway process. A process that is stopped (SIGSTOP) reacts to no other signal."""
        self._process.kill()

    def end(self) -> None:
        """Close the connection, and wait for the gateway process to exit."""
        self.connection.close()
        await_end(self._process)


class SupervisorsGateway:
    """A gateway that a supervisor has started, and that outlives this process.

    Raises:
        UserError: the gateway cannot be reached.
    """

    def __init__(self, supervisor: SupervisorAddress, model_names: list[str]):
        try:
            self.connection = local_socket.connect(Path(supervisor.directory), supervisor.token, model_names)
        except BrokenConnection as error:
            raise UserError(f"{error}; rank 0 must run on the host of launch.py supervise") from None

    def explain(self, error: BrokenConnection) -> BrokenConnection:
        """Return ``error`` unchanged, as the supervisor logs the cause."""
        return error

    def kill(self) -> None:
        """Do nothing: the supervisor ends the gateway after the ranks."""

    def end(self) -> None:
        """Close the connection."""
        self.connection.close()


def await_end(process: subprocess.Popen) -> None:
    """Wait for a gateway process without an engine host to exit; kill it after ``END_SECONDS``."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def start_gateway(
    setup: Setup, hosts: socket.socket, listener: socket.socket, beats: int | None = None
) -> subprocess.Popen:
    """Start a gateway process.

    Args:
        hosts: listening local socket for engine hosts.
        listener: listening socket for clients.
        beats: file descriptor of the pipe to which the gateway writes heartbeats; None for no heartbeats.
    """
    descriptors = (hosts.fileno(), listener.fileno(), *([] if beats is None else [beats]))
    # The gateway inherits this signal mask, so that Ctrl-C never reaches it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", GATEWAY, *map(str, descriptors)],
            pass_fds=descriptors,
            cwd=Path(labinfer.__file__).parent.parent,  # folder in which ``python -m`` finds labinfer
            stdin=subprocess.PIPE,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        with process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(setup))
    except BrokenPipeError:
        pass  # the process has exited, as the broken connection will show
    return process
