"""RUN_ALONE: functions of commands that can run in one process without a model, before ranks connect and before torch is
imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from labinfer.base.config import EngineOptions
from labinfer.base.errors import ExitStatus
from labinfer.comm.group.signals import SignalGuard
from labinfer.comm.spmd.environment import LaunchEnvironment


@dataclass(frozen=True, kw_only=True)
class ParsedCommand:
    """A parsed and checked command line.

    Args:
        given: engine options that the user has set.
        own: arguments of the command, other than the engine options.
    """

    environment: LaunchEnvironment
    signals: SignalGuard
    options: EngineOptions
    given: Mapping[str, Any]
    own: Mapping[str, Any]

    @property
    def rank(self) -> int:
        return self.environment.rank


def _run_cache(command: ParsedCommand) -> int:
    from labinfer.cli.commands.cache import run

    return run(command.own["own"]) if command.rank == 0 else ExitStatus.OK


def _run_simulate(command: ParsedCommand) -> int:
    from labinfer.cli.commands.simulate import run

    return run(command.options, *command.own["options"]) if command.rank == 0 else ExitStatus.OK


def _run_plan(command: ParsedCommand) -> int | None:
    from labinfer.cli.commands.auto_plan import check_flags, run

    check_flags(plan := command.own["own"], command.given)
    if not plan.cluster:
        return None
    return run(command.options, plan) if command.rank == 0 else ExitStatus.OK


def _run_chat(command: ParsedCommand) -> int | None:
    if not command.own["own"].url:
        return None
    from labinfer.cli.commands.chat_with_server import check_alone, run

    check_alone(command.environment, command.given)
    model, key = command.given.get("model", ""), command.environment.api_key
    return run(command.signals, model=model, key=key, **command.own)


RUN_ALONE: Mapping[str, Callable[[ParsedCommand], int | None]] = {
    "cache": _run_cache,
    "simulate": _run_simulate,
    "plan": _run_plan,
    "chat": _run_chat,
}
"""Maps the name of a command to a function that runs it in this process alone. The function returns the exit status, or None if the
command needs all ranks after all.

If flags are inconsistent, the function raises ``UserError`` on every rank.
"""
