"""The command line of ``supervise``: its flags, and the command that it starts and restarts."""

from __future__ import annotations

import os
import shlex
import shutil

from labinfer.base.config import SECTIONS, EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.option_fields import check_bounds, convert_section
from labinfer.base.plugins import PLUGINS, find_plugin, named_plugins
from labinfer.cli.flags import PROGRAMS, build_parser, parse_arguments
from labinfer.cli.own_options import check_job, check_own, given_options, take_models
from labinfer.comm.group.signals import SignalGuard
from labinfer.observe.output_file import STANDARD
from labinfer.server.supervisor.options import SuperviseOptions


def supervise(signals: SignalGuard, program: str, arguments: list[str]) -> int:
    """Run ``launch.py supervise [flags] -- LAUNCHER … launch.py [serve] …``.

    Raises:
        UserError: a flag of ``supervise`` or of the other command is invalid, or the other command cannot be restarted.
    """
    here = arguments.index("--") if "--" in arguments else len(arguments)
    _check_separator(program, arguments[:here], arguments[here + 1 :])
    given = given_options(build_parser("supervise", program).parse_args(arguments[:here]), SuperviseOptions)
    own = convert_section(SuperviseOptions, given)
    check_bounds(own)
    command = arguments[here + 1 :]
    programs = [index for index, word in enumerate(command) if os.path.basename(word) in PROGRAMS]
    if not programs:
        raise UserError(
            "supervise needs a command that starts ranks, as in supervise -- mpirun -n 2 python launch.py serve"
        )
    PLUGINS.load(map(find_plugin, named_plugins(command[programs[0] + 1 :])))
    if shutil.which(command[0]) is None:
        raise UserError(f"supervise: program {command[0]} not found; give its path")
    name, args = parse_arguments(command[programs[0] + 1 :], program)
    again, server, models = command, None, {}
    if name == "serve":
        models = take_models(args)
        server = check_own(name, args)["own"]
    elif name == "generate" and args.input not in (None, STANDARD) and args.output not in (None, STANDARD):
        if check_job(args)[0].overwrite:
            raise UserError(f"a supervised job resumes from its output; delete {args.output} and leave --overwrite out")
        again = command if args.resume else [*command, "--resume"]
    else:
        raise UserError("supervise restarts serve, or a job with --input FILE and --output FILE; give one of them")
    options = EngineOptions.from_flat(given_options(args, *SECTIONS))
    if options.model.autotune == "again":
        again = [*again, "--autotune", "on"]  # restarted ranks use the kernel timings of the first start
    from labinfer.cli.commands.supervise import run

    return run(
        signals,
        own,
        command,
        insists_on_rejoin="rejoin_timeout" in given,
        launch=programs[0],
        again=again,
        server=server,
        model_names=list(models),
        options=options,
    )


def _check_separator(program: str, flags: list[str], command: list[str]) -> None:
    """Check that ``--`` separates the flags of ``supervise`` from the command.

    Args:
        flags, command: words of the command line before and after the first ``--``.

    Raises:
        UserError: the command begins before ``--``; the message shows the right command line.
    """
    starts = (i for i, word in enumerate(flags) if os.path.basename(word) in PROGRAMS or shutil.which(word))
    if (start := next(starts, None)) is not None:
        words = [*flags[:start], "--", *flags[start:], *(["--"] if command else []), *command]
        raise UserError(f"supervise needs -- before the command to start: {program} supervise {shlex.join(words)}")
