"""``launch.py chat --url``: a conversation with a model on a server. Runs in one process, and does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from labinfer.base.errors import ExitStatus, Interrupted, UserError
from labinfer.base.option_fields import flag_name
from labinfer.base.standard_error import write_error
from labinfer.cli.terminal.chat import COMMANDS, Chat
from labinfer.cli.terminal.conversation import Conversation
from labinfer.cli.terminal.options import ChatOptions
from labinfer.cli.terminal.remote_server import RemoteServer
from labinfer.cli.terminal.terminal import Terminal
from labinfer.comm.group.signals import SignalGuard
from labinfer.comm.spmd.environment import LaunchEnvironment


def check_alone(environment: LaunchEnvironment, given: Collection[str]) -> None:
    """Check that there is a single process and no option for a local model: with ``--url``, the model runs on a server.

    Args:
        given: engine options that the user has set.

    Raises:
        UserError: there are several ranks, or an option for a local model is given.
    """
    if environment.world_size > 1:
        raise UserError(
            f"--url runs in one process, not {environment.world_size}; start it without mpirun, torchrun or srun"
        )
    for name in given:
        if name != "model":
            raise UserError(
                f"{flag_name(name)} applies to a model that is loaded here, not to a server; leave it or --url out"
            )


def run(signals: SignalGuard, own: ChatOptions, sampling: dict[str, Any], model: str, key: str) -> int:
    """Chat until the user leaves; returns the exit status.

    Args:
        sampling: sampling parameters that the user has set.
        model: name of a model of the server; empty for the server's first model.
        key: API key for the server; used if ``own`` has none.
    """
    try:
        backend = RemoteServer(own.url, own.api_key or key, model, signals)
        conversation = Conversation(own.system, sampling)
        signals.running, signals.interrupt_ends = True, False
        return Chat(Terminal(signals, list(COMMANDS)), backend, conversation, signals).run()
    except Interrupted as error:
        return 128 + error.signum
    except UserError as error:
        write_error(f"labinfer: error: {error}\n")
        return ExitStatus.USAGE
