"""The command line. Flags are generated from the dataclasses of ``config.py``, so each option is written down once.

``launch.py [options]`` runs prompts; ``launch.py plan`` shows the layout; ``launch.py bench comm`` measures the links,
``launch.py bench functions`` the arithmetic.
Nothing heavy is imported before the flags are read, so that ``--help`` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import itertools
import os
import sys
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import labinfer
from labinfer.config import (
    SECTIONS,
    CacheOptions,
    EngineOptions,
    FunctionBenchOptions,
    JobOptions,
    ModelOptions,
    ParallelOptions,
    RuntimeOptions,
    SamplingOptions,
    convert,
    flag_name,
    join,
)
from labinfer.errors import AgreedError, ExitStatus, UserError
from labinfer.executor.signals import SignalGuard
from labinfer.plan import SamplingParams
from labinfer.spmd.environment import detect, shorten_openmp_spins

if TYPE_CHECKING:
    from labinfer.commands.session import Session

COMMANDS = {
    "generate": (
        "Distributed large-language-model inference. The same command starts every rank.",
        (JobOptions, SamplingOptions, *SECTIONS),
    ),
    "plan": ("Show which rank would hold what, without loading anything.", SECTIONS),
    "bench comm": ("Latency and bandwidth of every collective and send in use.", (ParallelOptions, RuntimeOptions)),
    "bench functions": (
        "Every implementation of every function at a model's sizes, beside what the machine allows.",
        (FunctionBenchOptions, ModelOptions, ParallelOptions, CacheOptions, RuntimeOptions),
    ),
}
REPEATED = ("prompt", "stop")
"""Flags that may be given several times."""

EPILOG = """other commands:
  launch.py plan         show which rank would hold what
  launch.py bench comm   latency and bandwidth of every collective and send in use
  launch.py bench functions   every implementation of every function, beside what the machine allows

examples:
  python launch.py --prompt "17 + 25 = ?"
  python launch.py --model DIR --prompt "Hello"
  torchrun --nproc-per-node 4 launch.py --model DIR -tp 2 -pp 2 --input prompts.jsonl --output out.jsonl
  mpirun -n 3 python launch.py --model DIR -tp 2,1 --layers 14,10 --input prompts.jsonl
  python launch.py plan --model DIR -tp 2 -pp 2
exit status: 0 all done, 1 some requests failed, 2 wrong usage, 70 a rank failed, 130 Ctrl-C, 143 SIGTERM"""


class UsageError(UserError):
    """The flags do not parse."""


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
    """Run one command on this rank; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    signals = SignalGuard()
    shorten_openmp_spins()
    rank = 0
    try:
        environment = detect()
        rank = environment.rank
        name, args = _parse(arguments, rank)
        options = EngineOptions.from_flat(_given(args, *SECTIONS))
        command = _choose_command(name, args)
    except UserError as error:
        if rank == 0:  # every rank was given the same flags
            sys.stderr.write(f"labinfer: error: {error}\n")
        return ExitStatus.USAGE

    from labinfer.commands.session import Session, set_up_logging
    from labinfer.executor.failure import end_process_with, leave_agreed

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
    """The parser of one command: ``generate`` (no command word), ``plan``, ``bench comm`` …"""
    description, sections = COMMANDS[command]
    prog = "launch.py" if command == "generate" else f"launch.py {command}"
    parser = Parser(
        prog=prog,
        description=description,
        epilog=EPILOG if command == "generate" else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"labinfer {labinfer.__version__}")
    for section in sections:
        add_options(parser, section)
    return parser


def split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command's words and what follows them.

    Raises:
        UsageError: words that are no command.
    """
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    command = " ".join(words) or "generate"
    if command not in COMMANDS:
        known = ", ".join(name for name in COMMANDS if name != "generate")
        raise UsageError(
            f"there is no command {command!r}; commands are {known}, and without one --prompt or --input is run"
        )
    return command, arguments[len(words) :]


def add_options(parser: argparse.ArgumentParser, section: type) -> None:
    """A group of flags for a dataclass of options. Values are converted and checked later, all in one place."""
    group = parser.add_argument_group(section.__name__.removesuffix("Options").lower(), section.__doc__)
    hints = typing.get_type_hints(section)
    for f in dataclasses.fields(section):
        names = [name for name in (f.metadata["short"], flag_name(f.name)) if name]
        text = f.metadata["help"].replace("%", "%%")
        if hints[f.name] is bool:  # what is on by default can be turned off
            action = argparse.BooleanOptionalAction if f.default else "store_true"
            group.add_argument(*names, action=action, default=None, help=text)
            continue
        if f.default not in ("", 0, ()) and "default" not in text:
            text += f" (default: {join(f.default) if isinstance(f.default, tuple) else f.default})"
        metavar = f.metadata["metavar"] or "|".join(f.metadata["choices"])
        group.add_argument(
            *names, action="append" if f.name in REPEATED else "store", default=None, metavar=metavar, help=text
        )


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


def _choose_command(name: str, args: argparse.Namespace) -> Callable[[Session], int]:
    """The function that runs the chosen command, with its own options checked."""
    if name == "bench comm":
        from labinfer.commands import bench_comm

        return bench_comm.run
    if name == "bench functions":
        from labinfer.commands import bench_functions

        return functools.partial(bench_functions.run, bench=FunctionBenchOptions(**_given(args, FunctionBenchOptions)))
    if name == "plan":
        from labinfer.commands import plan

        return plan.run
    job = JobOptions(
        **{name: tuple(value) if name in REPEATED else value for name, value in _given(args, JobOptions).items()}
    )
    if bool(job.prompt) == bool(job.input):
        raise UserError("give either --prompt TEXT or --input FILE; see launch.py --help")
    if "" in job.prompt:
        raise UserError("--prompt is empty; give some text")
    hints = typing.get_type_hints(SamplingOptions)
    given = _given(args, SamplingOptions)
    sampling = SamplingParams(
        **{
            name: tuple(value)
            if name in REPEATED
            else value
            if hints[name] is bool
            else convert(name, value, hints[name])
            for name, value in given.items()
        }
    )
    from labinfer.commands import generate

    return functools.partial(generate.run, job=job, sampling=sampling)
