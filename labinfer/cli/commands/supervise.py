"""``launch.py supervise -- …``: restarts a server or a job when its ranks die.

The supervisor is one process, and not a rank. It imports torch only if a plugin of the command does.
"""

from __future__ import annotations

import os
import secrets

from labinfer.base.clock import SystemClock
from labinfer.base.config import EngineOptions
from labinfer.base.errors import ExitStatus, UserError
from labinfer.base.plugins import PLUGINS
from labinfer.comm.group.signals import SignalGuard
from labinfer.comm.spmd.environment import SupervisorAddress, supervised
from labinfer.observe.logs import set_up_logging
from labinfer.server.gateway.options import ServerOptions, Setup
from labinfer.server.gateway.process import listen
from labinfer.server.link.private_directory import private_directory
from labinfer.server.supervisor.elastic_restart import ElasticRestart
from labinfer.server.supervisor.launch_command import LaunchCommand
from labinfer.server.supervisor.options import SuperviseOptions
from labinfer.server.supervisor.restarts import Restarts
from labinfer.server.supervisor.supervised_gateway import SupervisedGateway
from labinfer.server.supervisor.supervisor import Supervisor

GRACE_SECONDS = 86400.0
"""Maximum seconds from a signal to the end of the supervisor. It is only a bound: the ranks' own timeouts are far shorter."""


def run(
    signals: SignalGuard,
    own: SuperviseOptions,
    command: list[str],
    *,
    insists_on_rejoin: bool,
    launch: int,
    again: list[str],
    server: ServerOptions | None,
    model_names: list[str],
    options: EngineOptions,
) -> int:
    """Supervise a group of ranks until it ends normally. Returns the group's exit status.

    Args:
        command: command that starts the group.
        insists_on_rejoin: whether the user has set ``--rejoin-timeout``, so that hosts must be known.
        launch: index of ``launch.py`` in ``command`` and ``again``.
        again: command that restarts the group after a failure.
        server: options of the group's server; None for a job.
        model_names: names of the served models.
        options: engine options of the ranks.

    Raises:
        UserError: the server's address is taken, its certificate cannot be used, there is no directory for a local socket, or the
            command names no hosts that ``--rejoin-timeout`` could wait for.
    """
    set_up_logging(0, options.runtime.log_level)
    signals.running, signals.grace_seconds = True, GRACE_SECONDS
    token = secrets.token_hex(16)
    with private_directory() as directory:
        launch_command = LaunchCommand(again, launch, directory)
        if insists_on_rejoin and len(launch_command.hosts) < 2:
            raise UserError(
                f"--rejoin-timeout {own.rejoin_timeout:g} needs an mpirun or mpiexec with at least two hosts (-hosts, -hostfile), which "
                f"{command[0]} does not have; leave the flag out (docs/operations.md describes restarts of torchrun and Slurm jobs)"
            )
        gateway = None
        port = 0
        if server is not None:
            server = server.absolute()
            setup = Setup(
                options=server,
                model_names=model_names,
                cpus=sorted(os.sched_getaffinity(0)),
                log_level=options.runtime.log_level,
                token=token,
                fault_timeout=options.runtime.fault_timeout,
                plugins=PLUGINS.loaded,
                outlives_host=True,
            )
            listener = listen(server)
            port = listener.getsockname()[1]
            gateway = SupervisedGateway(setup, directory, listener)
        address = SupervisorAddress(str(directory), token, port)
        restart = ElasticRestart(
            launch_command,
            again,
            options,
            read_nodes=address.read_nodes,
            timeout=own.rejoin_timeout,
            signum=lambda: signals.signum,
            clock=SystemClock(),
        )
        supervisor = Supervisor(
            command,
            restart.next_command,
            directory=directory,
            environment=supervised(address),
            restarts=Restarts(own.max_restarts),
            signum=lambda: signals.signum,
            gateway=gateway,
            clock=SystemClock(),
        )
        try:
            status = supervisor.run()
            if status == ExitStatus.USAGE and restart.is_smaller:  # with the missing machine, the model may fit again
                status = ExitStatus.INTERNAL
            return status
        finally:
            if gateway is not None:
                gateway.end()
