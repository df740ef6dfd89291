"""``launch.py serve``: models behind an OpenAI-compatible API; every rank takes part."""

from __future__ import annotations

import dataclasses
import logging
import socket

from labinfer.base.config import EngineOptions
from labinfer.base.errors import BrokenConnection, ExitStatus, UserError
from labinfer.cli.commands.hosting import Hosting
from labinfer.cli.commands.session import Session
from labinfer.comm.group.failure import end_process_with
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.group.signals import GRACE_SECONDS
from labinfer.server.gateway.access import ApiKeys
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.process import GatewayProcess, SupervisorsGateway, listen
from labinfer.server.host.gateway_connection import GatewayConnection
from labinfer.server.link.frames import host_heartbeat

logger = logging.getLogger(__name__)


def run(session: Session, own: ServerOptions, models: dict[str, str], listener: socket.socket | None = None) -> int:
    """Serve ``models``, by the names that requests use, until a signal arrives; returns the exit status.

    Args:
        listener: rank 0's socket for clients; None on other ranks, or if the supervisor has the socket.

    Raises:
        CollectiveError: an option, the port or a model is invalid; on every rank.
    """
    group, gateway, link = session.join(explains=True), None, None
    is_rank0, fault_timeout = group.rank == 0, session.options.runtime.fault_timeout
    with group.raise_on_all_ranks():
        if is_rank0:
            own = own.absolute()
            keys = ApiKeys.load(own.api_key, own.api_key_file, own.is_local)  # may raise, as no model is loaded yet
            cpus = sorted(group.everyone[0].cpus)
            level = session.options.runtime.log_level
            if supervisor := session.environment.supervisor:
                gateway, port = SupervisorsGateway(supervisor, list(models)), supervisor.port
            else:
                listener = listener or listen(own)
                port = listener.getsockname()[1]
                gateway = GatewayProcess(
                    listener, own, list(models), cpus, log_level=level, fault_timeout=fault_timeout
                )
            link = GatewayConnection(gateway.connection)
            progress = group.progress
            link.watch(
                fault_timeout,
                lambda: host_heartbeat(progress),
                lambda: _end_with_stopped(gateway, group, fault_timeout),
            )
    speculation = session.options.scheduler.speculative_config
    with group.raise_on_all_ranks():
        if len(models) > 1 and speculation and speculation.draft_rank:
            raise UserError(f"--speculative-config: draft_rank needs a single model, not {len(models)}; leave it out")
    layouts = {}
    for name, model in models.items():
        share = 1 / (len(models) - len(layouts))  # of three models, the first takes a third of the free memory
        layouts[name] = _model_options(session.options, model, share)
    hosting = Hosting(session, layouts, link, own, lambda: _announce_address(own, port, len(keys), list(models)))
    hosting.load()
    session.signals.running, session.signals.grace_seconds = True, own.drain_timeout + GRACE_SECONDS
    try:
        hosting.run()
    except BrokenConnection as error:
        raise gateway.explain(error) from None
    with group.raise_on_all_ranks():
        if is_rank0:
            gateway.end()
    hosting.llms.popitem()[1].close()
    return 128 + session.signals.signum if session.signals.signum else ExitStatus.OK


def _end_with_stopped(gateway: GatewayProcess | SupervisorsGateway, group: RankGroup, seconds: float) -> None:
    gateway.kill()
    message = (
        f"no heartbeat from the gateway process on {group.environment.node_name} for {seconds:g} s (--fault-timeout)"
    )
    end_process_with(BrokenConnection(f"{message}; stopping it and shutting down"), group)


def _model_options(options: EngineOptions, model: str, share: float) -> EngineOptions:
    return dataclasses.replace(
        options,
        model=dataclasses.replace(options.model, model=model),
        cache=dataclasses.replace(options.cache, memory_utilization=options.cache.memory_utilization * share),
    )


def _announce_address(options: ServerOptions, port: int, num_keys: int, names: list[str]) -> None:
    shown = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{options.scheme}://{shown}:{port}"
    logger.info("serving %s at %s/v1", ", ".join(names), address)
    logger.info("chat page %s/, cluster page %s/cluster, API reference %s/openapi.json", *[address] * 3)
    who = "none" if num_keys == 0 else "an API key" if num_keys == 1 else f"one of {num_keys} API keys"
    logger.info("authentication: %s", who)
    if not num_keys and not options.is_local:
        logger.warning(
            "warning: the server has no API key and anyone who can reach this machine can use it; give --api-key-file, or --host 127.0.0.1"
        )
