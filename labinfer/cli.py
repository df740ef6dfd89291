"""The command line. Flags are generated from the dataclasses of ``config.py``, so that each option is written down once.

``launch.py [options]`` runs prompts, ``launch.py serve`` and ``chat`` answer users, ``launch.py plan`` shows the layout,
``launch.py bench …`` measures. Nothing heavy is imported before the flags are read, so that ``--help`` and a wrong flag
answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import gc
import importlib
import itertools
import os
import shutil
import sys
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import labinfer
from labinfer.bench.options import (
    AccuracyOptions,
    BenchOptions,
    FunctionBenchOptions,
    LatencyOptions,
    LoadOptions,
    ServeOptions,
)
from labinfer.config import (
    SECTIONS,
    CacheOptions,
    EngineOptions,
    JobOptions,
    ModelOptions,
    ObserveOptions,
    ParallelOptions,
    RuntimeOptions,
    SamplingOptions,
    check_bounds,
    convert,
    convert_section,
    flag_name,
    join,
)
from labinfer.errors import AgreedError, ExitStatus, UserError
from labinfer.gateway.options import ServerOptions
from labinfer.group.signals import SignalGuard
from labinfer.observe.output_file import STANDARD
from labinfer.sampling_params import SamplingParams
from labinfer.spmd.environment import LaunchEnvironment, detect, shorten_openmp_spins
from labinfer.supervisor.options import SuperviseOptions
from labinfer.terminal.conversation import MANY_ANSWERS
from labinfer.terminal.options import ChatOptions
from labinfer.weights.read_ahead import start_reading_ahead

if TYPE_CHECKING:
    from labinfer.commands.session import Session

ENGINE_SECTIONS = tuple(section for section in SECTIONS if section is not ObserveOptions)
"""Sections of commands that run without end, and so never write a trace."""
COMMANDS = {
    "generate": (
        "Distributed large-language-model inference. The same command starts every rank.",
        (JobOptions, SamplingOptions, *SECTIONS),
    ),
    "serve": (
        "Serve models over OpenAI's API. The same command starts every rank.",
        (ServerOptions, *ENGINE_SECTIONS),
    ),
    "chat": (
        "Talk to a model in the terminal: one on these ranks, or one that is served. Sampling that is not given is as the "
        "checkpoint or the server would have it, and an answer may fill the context. In the chat, /help lists the commands.",
        (ChatOptions, SamplingOptions, *ENGINE_SECTIONS),
    ),
    "supervise": (
        "Start a server or a job again when its ranks die, as in launch.py supervise -- mpirun -n 2 python launch.py serve. "
        "A server's clients see a pause, and no error; a job goes on where it was.",
        (SuperviseOptions,),
    ),
    "plan": ("Show which rank would hold what, without loading anything.", SECTIONS),
    "bench latency": (
        "Time of a fixed batch, from its first request to its last token.",
        (BenchOptions, LatencyOptions, *SECTIONS),
    ),
    "bench throughput": (
        "Requests and tokens a second, with all requests there from the beginning.",
        (BenchOptions, LoadOptions, *SECTIONS),
    ),
    "bench serve": (
        "Latencies of requests that arrive one by one, whether or not the engine keeps up.",
        (BenchOptions, LoadOptions, ServeOptions, *SECTIONS),
    ),
    "bench comm": ("Latency and bandwidth of every collective and send in use.", (ParallelOptions, RuntimeOptions)),
    "bench accuracy": (
        "What dtypes, quantised weights and KV cache types lose against the float32 model: of all of them, or of "
        "the one that --dtype, --quantization and --kv-cache-dtype name.",
        (AccuracyOptions, ModelOptions, ParallelOptions, CacheOptions, RuntimeOptions),
    ),
    "bench functions": (
        "Every implementation of every function at a model's sizes, beside what the machine allows.",
        (FunctionBenchOptions, ModelOptions, ParallelOptions, CacheOptions, RuntimeOptions),
    ),
}
PROGRAMS = ("launch.py", "bin/labinfer")
"""Ends of this program's names in command lines."""
MODULES = {"plan": "layout"}
"""Modules of ``labinfer.commands`` that are not named like their command."""
REPEATED = ("prompt", "stop", "api_key")
"""Flags that may be given several times."""
REPEATED_BY_COMMAND = {"serve": (*REPEATED, "model"), "chat": ("stop",)}
"""Flags that may be given several times, of commands that differ from ``REPEATED``."""
DEFAULTS_BY_COMMAND: dict[str, dict[str, Any]] = {
    "chat": {"log_level": "warning"} | {f.name: "" for f in dataclasses.fields(SamplingOptions)},
}
"""Defaults that differ from the dataclass's; empty for options that are left to the model or its server."""
LEFT_OUT_BY_COMMAND = {"chat": MANY_ANSWERS}
"""Options that make no sense for a command."""

EPILOG = """other commands:
  launch.py serve              OpenAI's API over HTTP
  launch.py chat               talk to a model in the terminal
  launch.py supervise -- …     start a server or a job again when its ranks die
  launch.py plan               show which rank would hold what
  launch.py bench latency      time of a fixed batch
  launch.py bench throughput   requests and tokens a second
  launch.py bench serve        latencies of requests that arrive one by one
  launch.py bench comm         latency and bandwidth of every collective and send in use
  launch.py bench functions    every implementation of every function, beside what the machine allows
  launch.py bench accuracy     what dtypes and quantised weights lose in quality

examples:
  python launch.py --prompt "17 + 25 = ?"
  python launch.py --model DIR --prompt "Hello"
  torchrun --nproc-per-node 4 launch.py --model DIR -tp 2 -pp 2 --input prompts.jsonl --output out.jsonl
  mpirun -n 3 python launch.py --model DIR -tp 2,1 --layers 14,10 --input prompts.jsonl
  python launch.py chat --url http://127.0.0.1:8000
  python launch.py plan --model DIR -tp 2 -pp 2
exit status: 0 all done, 1 some requests failed, 2 wrong usage, 70 a rank failed, 130 Ctrl-C, 143 SIGTERM"""


class UsageError(UserError):
    """Flags that do not parse."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing, so that only rank 0 speaks."""

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse_args(self, arguments: list[str]) -> argparse.Namespace:  # type: ignore[override]
        args, unknown = self.parse_known_args(arguments)
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._option_string_actions, n=1)
            self.error(f"unknown option {unknown[0]}" + (f" (did you mean {near[0]}?)" if near else ""))
        return args


def main(argv: list[str] | None = None) -> int:
    """Run a command on this rank. Returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    signals = SignalGuard()
    shorten_openmp_spins()
    try:
        if arguments[:1] == ["supervise"]:
            return _supervise(signals, arguments[1:])
        environment = detect()
    except UserError as error:
        sys.stderr.write(f"labinfer: error: {error}\n")
        return ExitStatus.USAGE
    status = _run(environment, signals, arguments)
    if environment.rank == 0 and environment.supervisor and status < ExitStatus.INTERNAL:  # not of a signal, either
        environment.supervisor.write_status(status)
    return status


def _run(environment: LaunchEnvironment, signals: SignalGuard, arguments: list[str]) -> int:
    rank = environment.rank
    try:
        name, args = _parse(arguments, rank)
        models = _take_models(args) if name == "serve" else {}
        given = _given(args, *SECTIONS)
        usual = {key: value for key, value in DEFAULTS_BY_COMMAND.get(name, {}).items() if value}
        options = EngineOptions.from_flat(usual | given)
        own = _check_own(name, args) | ({"models": models} if models else {})
        if name == "chat" and own["own"].url:
            _check_alone(environment, given)
            from labinfer.commands.chat_with_server import run

            return run(signals, model=given.get("model", ""), key=environment.api_key, **own)
    except UserError as error:
        if rank == 0:  # every rank was given the same flags
            sys.stderr.write(f"labinfer: error: {error}\n")
        return ExitStatus.USAGE

    if name in ("generate", "serve", "chat") and environment.is_one_node:
        start_reading_ahead(
            options.model.model, environment.model_dir, environment.local_rank, environment.local_world_size
        )
    gc.disable()  # imported modules are no garbage, so collecting while they load only costs time
    from labinfer.commands.session import Session
    from labinfer.group.failure import end_process_with, leave_agreed
    from labinfer.observe.logs import set_up_logging

    command = _import_command(name, own)
    gc.freeze()
    gc.enable()
    set_up_logging(rank, options.runtime.log_level)
    session = Session(environment, options, signals)
    try:
        return command(session)
    except AgreedError as error:
        leave_agreed(error, session.group)
        return ExitStatus.USAGE
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends the group
        return end_process_with(error, session.group, session.group is not None or environment.local_rank == 0)


def build_parser(command: str = "generate") -> Parser:
    """The parser of a command of ``COMMANDS``; ``generate`` has no command word."""
    description, sections = COMMANDS[command]
    prog = "launch.py" if command == "generate" else f"launch.py {command}"
    parser = Parser(
        prog=prog,
        description=description,
        epilog=EPILOG if command == "generate" else None,
        formatter_class=argparse.RawDescriptionHelpFormatter if command == "generate" else argparse.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"labinfer {labinfer.__version__}")
    for section in sections:
        repeated, left_out = REPEATED_BY_COMMAND.get(command, REPEATED), LEFT_OUT_BY_COMMAND.get(command, ())
        add_options(parser, section, repeated, DEFAULTS_BY_COMMAND.get(command, {}), left_out)
    return parser


def split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command's name and the arguments after it.

    Raises:
        UsageError: the first words are no command.
    """
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    command = " ".join(words) or "generate"
    if command not in COMMANDS:
        known = ", ".join(name for name in COMMANDS if name != "generate")
        raise UsageError(
            f"there is no command {command!r}; commands are {known}, and without one --prompt or --input is run"
        )
    return command, arguments[len(words) :]


def add_options(
    parser: argparse.ArgumentParser,
    section: type,
    repeated: tuple[str, ...] = REPEATED,
    defaults: dict[str, Any] | None = None,
    left_out: tuple[str, ...] = (),
) -> None:
    """Add a group of flags for a dataclass of options. Their values are converted and checked later.

    Args:
        repeated: fields whose flags may be given several times.
        defaults: defaults that differ from the dataclass's.
        left_out: fields that are no flags.
    """
    group = parser.add_argument_group(section.__name__.removesuffix("Options").lower(), section.__doc__)
    hints = typing.get_type_hints(section)
    for f in dataclasses.fields(section):
        if f.name in left_out:
            continue
        names = [name for name in (f.metadata["other_name"], flag_name(f.name)) if name]
        text = f.metadata["help"].replace("%", "%%")
        if hints[f.name] is bool:  # a flag that is on by default can be turned off
            action = argparse.BooleanOptionalAction if f.default else "store_true"
            group.add_argument(*names, dest=f.name, action=action, default=None, help=text)
            continue
        default = (defaults or {}).get(f.name, f.default)
        if default not in ("", 0, ()) and "default" not in text:
            text += f" (default: {join(default) if isinstance(default, tuple) else default})"
        metavar = f.metadata["metavar"] or "|".join(f.metadata["choices"])
        action = "append" if f.name in repeated else "store"
        group.add_argument(*names, dest=f.name, action=action, default=None, metavar=metavar, help=text)


def _parse(arguments: list[str], rank: int) -> tuple[str, argparse.Namespace]:
    command, flags = split_command(arguments)
    with contextlib.ExitStack() as stack:
        if rank != 0:  # --help is printed once
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        return command, build_parser(command).parse_args(flags)


def _given(args: argparse.Namespace, *sections: type) -> dict[str, Any]:
    """The options that were given, by field name."""
    names = [f.name for section in sections for f in dataclasses.fields(section)]
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def _check_own(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A command's own options, which its ``run`` receives beside the session."""
    if name == "generate":
        job, sampling = _check_job(args)
        return {"job": job, "sampling": sampling}
    if name == "chat":
        sampling = _sampling(args)
        SamplingParams(**sampling)  # refused before anything is loaded
        return {"own": convert_section(ChatOptions, _given(args, ChatOptions)), "sampling": sampling}
    own = [convert_section(section, _given(args, section)) for section in COMMANDS[name][1] if section not in SECTIONS]
    for section in own:
        check_bounds(section)
    if len(own) == 1:
        return {"own": own[0]}
    return {"kind": name.removeprefix("bench "), "options": own} if own else {}


def _take_models(args: argparse.Namespace) -> dict[str, str]:
    """The models of ``serve --model [NAME=]DIR|NAME``, by the names that requests use; the first one stays in ``args``.

    Raises:
        UserError: two models have the same name.
    """
    models: dict[str, str] = {}
    for text in args.model or [ModelOptions.model]:
        name, is_named, model = text.partition("=")
        if os.path.isdir(text):
            name, model = os.path.basename(os.path.abspath(text)), text
        elif not is_named:
            model = text
        if not name or not model:
            raise UserError(f"--model {text}: give NAME=DIR, or DIR")
        if name in models:
            raise UserError(
                f"--model {text}: there is a model {name} already; give it another name, as in NAME={model}"
            )
        models[name] = model
    args.model = next(iter(models.values()))
    return models


def _check_job(args: argparse.Namespace) -> tuple[JobOptions, SamplingParams]:
    """The prompts or the job to run, and the sampling of requests without their own."""
    job = JobOptions(
        **{name: tuple(value) if name in REPEATED else value for name, value in _given(args, JobOptions).items()}
    )
    if bool(job.prompt) == bool(job.input):
        raise UserError("give either --prompt TEXT or --input FILE; see launch.py --help")
    if job.overwrite and (job.resume or job.retry_errors):
        raise UserError("--overwrite empties the output that --resume goes on with; give one of them")
    if "" in job.prompt:
        raise UserError("--prompt is empty; give some text")
    return job, SamplingParams(**_sampling(args))


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that were given."""
    hints = typing.get_type_hints(SamplingOptions)
    return {
        name: tuple(value) if name in REPEATED else value if hints[name] is bool else convert(name, value, hints[name])
        for name, value in _given(args, SamplingOptions).items()
    }


def _check_alone(environment: LaunchEnvironment, engine: dict[str, Any]) -> None:
    """Check that ``chat --url`` has one process and no options for a model, as the server has the model.

    Raises:
        UserError: there are several ranks, or such an option is given.
    """
    if environment.world_size > 1:
        raise UserError(f"--url needs one process, not {environment.world_size}; leave the launcher out")
    for name in engine:
        if name != "model":
            raise UserError(
                f"{flag_name(name)} is for a model of one's own, and the server has it; leave it or --url out"
            )


def _supervise(signals: SignalGuard, arguments: list[str]) -> int:
    """``launch.py supervise [flags] -- LAUNCHER … launch.py [serve] …``.

    Raises:
        UserError: a flag of either is wrong, or there is nothing that could be started again.
    """
    here = arguments.index("--") if "--" in arguments else len(arguments)
    own = convert_section(
        SuperviseOptions, _given(build_parser("supervise").parse_args(arguments[:here]), SuperviseOptions)
    )
    check_bounds(own)
    command = arguments[here + 1 :]
    programs = [index for index, word in enumerate(command) if word.endswith(PROGRAMS)]
    if not programs:
        raise UserError(
            "supervise needs a command that starts ranks, as in supervise -- mpirun -n 2 python launch.py serve"
        )
    if shutil.which(command[0]) is None:
        raise UserError(f"supervise: there is no program {command[0]} to start; give its path")
    name, args = _parse(command[programs[0] + 1 :], 0)
    again, server, models = command, None, {}
    if name == "serve":
        models = _take_models(args)
        server = _check_own(name, args)["own"]
    elif name == "generate" and args.input not in (None, STANDARD) and args.output not in (None, STANDARD):
        if _check_job(args)[0].overwrite:
            raise UserError(
                f"a job that is supervised goes on with its output; remove {args.output} and leave --overwrite out"
            )
        again = command if args.resume else [*command, "--resume"]
    else:
        raise UserError("supervise starts serve again, or a job with --input FILE and --output FILE; give one of them")
    options = EngineOptions.from_flat(_given(args, *SECTIONS))
    from labinfer.commands.supervise import run

    return run(
        signals,
        own,
        command,
        launch=programs[0],
        again=again,
        server=server,
        model_names=list(models),
        options=options,
    )


def _import_command(name: str, own: dict[str, Any]) -> Callable[[Session], int]:
    """The function that runs the chosen command. Imports torch and all else that a run needs."""
    module_name = "bench_engine" if "kind" in own else MODULES.get(name, name.replace(" ", "_"))
    module = importlib.import_module(f"labinfer.commands.{module_name}")
    return functools.partial(module.run, **own)
