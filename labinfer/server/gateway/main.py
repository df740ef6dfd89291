"""The gateway process, between HTTP clients and an engine host. It does not import torch, so that it starts within a second.

It inherits two bound sockets, one for engine hosts and one for clients, and reads a ``Setup`` from standard input. A gateway of a
supervisor also inherits a pipe for heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import msgspec
import uvicorn

from labinfer.base.errors import BrokenConnection, ExitStatus, UserError
from labinfer.base.heartbeat import BEATS
from labinfer.base.plugins import PLUGINS
from labinfer.base.standard_error import STANDARD_ERROR, protect_standard_streams
from labinfer.comm.group.signals import die_with_parent
from labinfer.observe.line_writer import LineWriter
from labinfer.server.gateway.app import make_app
from labinfer.server.gateway.async_llm_engine import AsyncLLMEngine
from labinfer.server.gateway.client_connection import ClientConnection
from labinfer.server.gateway.host_connection import HostListener
from labinfer.server.gateway.options import BACKLOG, MIB, Setup
from labinfer.server.gateway.service import Service

M_MMAP_THRESHOLD = -3
PRIVATE = 0o077
"""Mask of file permissions (umask): only this user may read files of ``--files-dir``, as they hold prompts and answers."""
logger = logging.getLogger(__name__)

DRAIN_SECONDS = 3
"""Seconds in which open responses may finish after the engine has ended."""


class Server(uvicorn.Server):
    """uvicorn's server without signal handlers: the engine host handles signals, and ends the gateway."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(hosts: int, listener: int, beats: int | None = None) -> None:
    """Serve until an engine host sends ``Shutdown``, or until one dies and no other is expected.

    Args:
        hosts, listener: file descriptors of the listening sockets for engine hosts and for clients.
        beats: file descriptor of the pipe to which heartbeats are written; None without a supervisor.
    """
    protect_standard_streams()
    os.umask(PRIVATE)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the host gets the signal, too, and ends gateway and ranks in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    setup = _read_setup()
    if setup.outlives_host:
        die_with_parent(signal.SIGKILL)
    os.sched_setaffinity(0, setup.cpus)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is an open file
    _return_large_blocks()
    gc.freeze()  # imported modules are never garbage: do not scan them while requests wait
    log = LineWriter(STANDARD_ERROR)
    logging.basicConfig(stream=log, format="labinfer: %(message)s", level=logging.ERROR)  # log level of libraries
    logging.getLogger("labinfer").setLevel(setup.log_level.upper())
    PLUGINS.adopt(setup.plugins)
    try:
        asyncio.run(_serve(socket.socket(fileno=hosts), socket.socket(fileno=listener), setup, beats, log))
    finally:
        log.close()


def _return_large_blocks() -> None:
    """Make malloc return blocks of 1 MiB and more to the system when they are freed, so that one long body does not enlarge this
    process permanently. By default, glibc raises the threshold of 1 MiB whenever a larger block is freed (``mallopt(3)``,
    M_MMAP_THRESHOLD)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MIB)


async def _serve(
    hosts: socket.socket, listener: socket.socket, setup: Setup, beats: int | None, log: LineWriter
) -> None:
    engine = AsyncLLMEngine(outlives_host=setup.outlives_host, stall_seconds=setup.fault_timeout)
    try:
        service = Service(setup.options, setup.model_names, engine, log=log)
    except UserError as error:
        logger.error("error: %s", error)
        return
    app = make_app(service)
    config = uvicorn.Config(
        app,
        http=functools.partial(ClientConnection, max_connections=setup.options.max_connections),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=BACKLOG,
        ssl_certfile=setup.options.ssl_certfile or None,
        ssl_keyfile=setup.options.ssl_keyfile or None,
        timeout_keep_alive=setup.options.keep_alive,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    server = Server(config)
    service.metrics.watch_connections(lambda: len(server.server_state.connections))
    host_listener = HostListener(hosts, setup.token, setup.model_names, setup.fault_timeout)
    if service.files is not None:
        app.state.batches.resume()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    preparing = asyncio.create_task(service.prepare_models())
    hosting = asyncio.create_task(_run_hosts(host_listener, engine, setup.outlives_host))
    beating = asyncio.create_task(_beat(beats, setup.fault_timeout / BEATS)) if beats is not None else None
    try:
        await asyncio.wait((hosting, preparing), return_when=asyncio.FIRST_COMPLETED)
        if preparing.done():  # run_hosts never returns, so it has raised
            preparing.result()
        hosting.result()
    except UserError as error:
        logger.error("error: %s", error)
    except BrokenConnection as error:  # the host or its launcher logs why
        logger.debug("%s", error)
    finally:
        preparing.cancel()
        hosting.cancel()
        server.should_exit = True
        await serving
        await asyncio.to_thread(service.close)
        if beating is not None:
            beating.cancel()


async def _run_hosts(hosts: HostListener, engine: AsyncLLMEngine, goes_on: bool) -> None:
    """Serve with one engine host after another, until one sends ``Shutdown``.

    Raises:
        BrokenConnection: a host has ended without ``Shutdown``, and ``goes_on`` is false.
    """
    while True:
        link = await hosts.accept()
        try:
            await engine.run(link)
            return
        except BrokenConnection as error:
            if not goes_on:
                raise
            logger.warning("%s; waiting for another", error)


async def _beat(pipe: int, seconds: float) -> None:
    """Write heartbeats to ``pipe`` from the event loop, so that a blocked loop sends none. If the pipe has no reader, end the
    process: the supervisor may have died before this process set its parent-death signal."""
    os.set_blocking(pipe, False)
    while True:
        try:
            os.write(pipe, b".")
        except BlockingIOError:
            pass  # the pipe is full of unread heartbeats
        except BrokenPipeError:
            os._exit(ExitStatus.INTERNAL)
        await asyncio.sleep(seconds)


def _read_setup() -> Setup:
    data = sys.stdin.buffer.read()
    if not data:
        raise SystemExit(1)  # the parent process ended before it wrote the setup
    return msgspec.msgpack.decode(data, type=Setup)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
