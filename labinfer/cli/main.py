"""main: the command line's entry point on every rank.

For example, ``launch.py [options]`` runs prompts, ``launch.py serve`` and ``chat`` answer users, ``launch.py plan`` shows the
layout, ``launch.py bench …`` measures. No heavy module is imported before the flags are parsed, so that ``--help`` and invalid
flags answer at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import math
import os
import signal
import sys
import threading
import time
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labinfer.base.config import AUTO_LAYOUT, GROUP_SECTIONS, SECTIONS, EngineOptions, ModelOptions
from labinfer.base.errors import CollectiveError, ExitStatus, Interrupted, UserError
from labinfer.base.plugins import PLUGINS, find_plugin, named_plugins
from labinfer.base.registry import REGISTRY
from labinfer.base.standard_error import protect_standard_streams, write_error
from labinfer.cli.alone import RUN_ALONE, ParsedCommand
from labinfer.cli.bench.options import LoadOptions
from labinfer.cli.command_table import commands
from labinfer.cli.flags import (
    PROGRAM,
    QUOTES,
    QUOTES_HINT,
    Parser,
    add_options,
    parse_arguments,
    program_name,
)
from labinfer.cli.own_options import check_own, given_options, take_models
from labinfer.cli.supervised import supervise
from labinfer.comm.group.signals import SignalGuard, die_with_launcher
from labinfer.comm.spmd.address_space import check_address_space, describe_limit, explain_by_limit
from labinfer.comm.spmd.backend_plugin import explain_backend_plugin
from labinfer.comm.spmd.environment import LaunchEnvironment, detect, shorten_openmp_spins
from labinfer.comm.spmd.topology import stage_sizes
from labinfer.observe.progress_line import PLAIN_SECONDS, START_SECONDS, Ticker
from labinfer.observe.standard_output import interrupt_at_closed_output

if TYPE_CHECKING:
    from labinfer.cli.commands.session import Session
    from labinfer.comm.group.rank_group import RankGroup

EXIT_SECONDS = 10
"""Seconds after which SIGALRM kills a process that hangs in exit handlers of its libraries."""
EXIT_DELAY_SECONDS = 0.3
"""Seconds by which ranks other than 0 delay their exit after an error: rank 0 prints the error before the launcher kills all
ranks."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line on this rank. Returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    program = program_name(sys.argv[0]) if argv is None else PROGRAM
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    signals = SignalGuard()
    shorten_openmp_spins()
    try:
        if arguments[:1] == ["supervise"]:
            return supervise(signals, program, arguments[1:])
        environment = detect()
    except UserError as error:
        _refuse(error)
        return ExitStatus.USAGE
    die_with_launcher(environment)  # before torch is imported, which takes seconds
    try:
        status = _run(environment, signals, program, arguments)
    except (MemoryError, ImportError, OSError, RuntimeError) as error:
        if plugin := explain_backend_plugin(error):
            plugin = f"{plugin} (rank {environment.rank} on {environment.node_name})"
        if not (text := explain_by_limit(error) or plugin):
            raise
        if environment.local_rank == 0:  # the machine's other ranks have this limit or plugin, too
            _refuse(UserError(text))
        return ExitStatus.USAGE
    if environment.rank == 0 and environment.supervisor and status < ExitStatus.INTERNAL:  # no fault, no signal
        environment.supervisor.write_status(status)
    return status


def run_program() -> typing.NoReturn:
    """Run the command line, and end the process at once, without freeing torch's modules."""
    protect_standard_streams()  # first: a new file could get the number of a closed standard descriptor
    interrupt_at_closed_output()
    try:
        status = main()
    except SystemExit as end:  # raised by --help and --version
        status = end.code or ExitStatus.OK
    except Interrupted as error:
        status = 128 + error.signum
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        raise SystemExit(status)  # Python waits for such threads
    atexit._run_exitfuncs()  # includes MPI_Finalize
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard output is closed or missing
        try:
            sys.stdout.flush()
        except Interrupted as error:
            status = status or 128 + error.signum
    if "mpi4py.MPI" in sys.modules:
        # MPICH reports a normal exit to mpirun from a C exit handler; without it mpirun returns 0 or 9. PyDLL keeps the GIL, so that
        # no daemon thread runs meanwhile.
        signal.alarm(EXIT_SECONDS)
        ctypes.PyDLL(None).exit(status)
    os._exit(status)


def _run(environment: LaunchEnvironment, signals: SignalGuard, program: str, arguments: list[str]) -> int:
    rank, group = environment.rank, None
    try:
        if plugins := named_plugins(arguments):
            if environment.world_size > 1:
                group = _meet(environment, arguments, plugins)
                group.load_plugins(plugins)
            else:
                PLUGINS.load(map(find_plugin, plugins))
        with (
            group.raise_on_all_ranks() if group is not None else contextlib.nullcontext()
        ):  # rank 0 may run a command here while the others wait
            chosen = _choose(environment, signals, program, arguments)
    except CollectiveError as error:
        from labinfer.comm.group.failure import leave_agreed

        leave_agreed(error, group)
        return ExitStatus.USAGE
    except UserError as error:
        if rank == 0:  # every rank has found this error in the flags or files
            _refuse(error)
        else:  # rank 0 prints the error; the launcher kills it when this rank exits
            time.sleep(EXIT_DELAY_SECONDS)
        return ExitStatus.USAGE
    except Exception as error:
        if group is None:
            raise
        from labinfer.comm.group.failure import end_process_with

        return end_process_with(error, group)
    if isinstance(chosen, int):
        if group is not None:
            group.close()
        return chosen
    name, options, own, refusal = chosen
    if environment.local_rank == 0 and (limit := describe_limit()):
        # Before the model is loaded: without memory, C++ code aborts the process without a message.
        write_error(f"labinfer: warning: {limit}; a process that needs more may be killed without a message\n")
    if name in ("generate", "serve", "chat", "verify"):
        from labinfer.launch.prefetch import prefetch_weights

        prefetch_weights(environment, options)
    starting = None
    if rank == 0:  # also if standard error is no terminal: it may be a launcher's pipe
        seconds = START_SECONDS if environment.world_size > 1 else PLAIN_SECONDS
        text = "stopping all ranks" if refusal else "starting: importing torch"
        starting = Ticker(lambda: text, plain_seconds=math.inf if refusal else seconds)  # after an error, no more lines
    gc.disable()  # imported modules are never garbage, so collecting meanwhile only costs time
    from labinfer.cli.commands.session import Session
    from labinfer.comm.group.failure import end_process_with, leave_agreed
    from labinfer.observe.logs import set_up_logging

    command = _import_command(name, own)
    gc.freeze()
    gc.enable()
    set_up_logging(rank, options.runtime.log_level)
    session = Session(
        environment=environment, options=options, signals=signals, starting=starting, refusal=refusal, group=group
    )
    try:
        return command(session)
    except CollectiveError as error:
        leave_agreed(error, session.group, is_said=refusal is not None)
        return ExitStatus.USAGE
    except BaseException as error:  # noqa: BLE001 - any exception ends the group
        return end_process_with(error, session.group, session.group is not None or environment.local_rank == 0)


def _meet(environment: LaunchEnvironment, arguments: list[str], plugins: list[str]) -> RankGroup:
    """Join the group of ranks before the command line is parsed, because a plugin may add commands, flags, and values
    of flags.

    Raises:
        UserError: a flag of ``GROUP_SECTIONS`` is invalid, or the ranks cannot connect.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    for section in GROUP_SECTIONS:
        add_options(parser, section)
    parser.add_argument("--reproducible", nargs="?", const="on")
    args, _ = parser.parse_known_args(arguments)
    values = given_options(args, *GROUP_SECTIONS)
    if args.reproducible is not None:
        values["reproducible"] = args.reproducible
    options = EngineOptions.group_options(values)
    from labinfer.comm.group.failure import end_process_with
    from labinfer.comm.group.rank_group import join_group

    try:
        return join_group(environment, options, plugins)
    except UserError:
        raise
    except BaseException as error:  # noqa: BLE001 - any exception ends the group
        return end_process_with(error, None, environment.local_rank == 0)


def _choose(
    environment: LaunchEnvironment, signals: SignalGuard, program: str, arguments: list[str]
) -> int | tuple[str, EngineOptions, dict[str, Any], UserError | None]:
    """Parse and check the command line. A command that needs neither other ranks nor a model runs here.

    Returns the exit status if the command has run. Otherwise returns the command's name, the engine options, the command's other
    arguments, and an error that only rank 0 has found (or None).

    Raises:
        UserError: a flag is invalid, or the model cannot be found; raised on every rank.
    """
    rank = environment.rank
    name, args = parse_arguments(arguments, program, rank)
    models = take_models(args) if name == "serve" else {}
    given = given_options(args, *SECTIONS)
    flags = commands()[name]
    usual = {key: value for key, value in flags.defaults.items() if value}
    if name == "generate" and args.prompt:
        usual["log_level"] = "warning"
        for text in args.prompt:
            if rank == 0 and len(text) > 1 and {text[0], text[-1]} <= {*QUOTES}:
                write_error(f"labinfer: warning: the quotes in {text} are sent to the model: {QUOTES_HINT}\n")
    if name == "plan" and not getattr(
        args, "auto", False
    ):  # facts about this launch's ranks say little about the planned layout
        usual["log_level"] = "warning"
    options = EngineOptions.from_flat(usual | given)
    own = check_own(name, args) | ({"models": models} if models else {})
    if len(models) > 1 and options.parallel.layout:
        raise UserError(
            f"--layout supports one model, and --model was given {len(models)} times; leave --layout out, or serve one model"
        )
    if name in RUN_ALONE:
        command = ParsedCommand(environment=environment, signals=signals, options=options, given=given, own=own)
        if (status := RUN_ALONE[name](command)) is not None:
            return status
    if ModelOptions in flags.options and (name != "plan" or environment.world_size > 1):
        parallel = options.parallel
        stage_sizes(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.layers,
            environment.world_size,
            ranks=parallel.ranks,
        )
    if environment.is_one_node and ModelOptions in flags.options:  # other nodes may have files that are missing here
        for model in models.values() or [options.model.model]:
            _check_model(model, options.model.hub_or(environment.hub), environment)
    if environment.is_one_node and name == "generate":
        from labinfer.api.batch.reader import check_input

        check_input(own["job"].input)
    check_address_space()
    refusal = None
    if rank == 0:
        try:
            own |= _open(name, environment, options, own)
        except UserError as error:
            if environment.world_size == 1:
                raise
            _refuse(error)
            refusal = error  # the other ranks learn of the error, and end, when all ranks have connected
    return name, options, own, refusal


def _refuse(error: UserError) -> None:
    write_error(f"labinfer: error: {error}\n")


def _check_model(model: str, hub: str, environment: LaunchEnvironment) -> None:
    """Check that the model exists before torch is imported, which takes seconds. A single rank also looks in the model hub. Several
    ranks do so only after they have connected, as all wait for the rank that downloads the model.

    Raises:
        UserError: there is no such directory, or it has no supported model.
    """
    from labinfer.models.architectures import check_architecture
    from labinfer.weights.resolve import find_directory, find_here, resolve_model

    directory, _ = find_directory(model, environment.model_dir)
    if directory is None and environment.world_size == 1:
        directory = resolve_model(model, environment.model_dir, may_download=True, hub=hub)
    elif directory is None:
        directory = find_here(model, environment.model_dir, hub)
    if directory is not None:
        check_architecture(directory)


def _open(name: str, environment: LaunchEnvironment, options: EngineOptions, own: dict[str, Any]) -> dict[str, Any]:
    """Open the files and sockets of a command before torch is imported. Returns the open files and sockets as arguments of the
    command's ``run``.

    Raises:
        UserError: a file cannot be read or written, the server's address is taken, or the folder of the server's files cannot be
            used.
    """
    if options.parallel.layout not in ("", AUTO_LAYOUT):
        from labinfer.planner.saved_plan import SavedPlan

        SavedPlan.read(options.parallel.layout)
    if name == "generate":
        from labinfer.api.batch.job_files import JobFiles, open_quickly

        if options.parallel.layout or (environment.world_size > 1 and not open_quickly(own["job"])):
            return {}
        return {"files": JobFiles.open(own["job"], options, own["sampling"])}
    if name == "verify":
        from labinfer.api.batch.recorded_job import RecordedJob

        return {"job": RecordedJob.open(own["own"].job, own["own"].input)}
    if name == "serve":
        from labinfer.server.gateway.access import ApiKeys
        from labinfer.server.gateway.process import listen

        server = own["own"].absolute()
        ApiKeys.load(server.api_key, server.api_key_file, server.is_local)
        return {"own": server} | ({} if environment.supervisor else {"listener": listen(server)})
    for section in own.get("options", [own["own"]] if "own" in own else []):
        if plot := getattr(section, "plot", ""):
            from labinfer.cli.commands.plot_file import check_plot

            check_plot(plot)
        if isinstance(section, LoadOptions):
            section.check_files()
    return {}


def _import_command(name: str, own: dict[str, Any]) -> Callable[[Session], int]:
    """Import the module of the command ``name``, and with it torch, and return the function that runs the command."""
    return functools.partial(REGISTRY.find("command", name), **own)
