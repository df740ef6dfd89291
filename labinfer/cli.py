"""The command line. Flags are generated from the dataclasses of ``config.py``, so each option is written down once.

``launch.py [options]`` runs prompts; ``launch.py plan`` shows the layout; ``launch.py bench comm`` measures the links.
Nothing heavy is imported before the flags are read, so that ``--help`` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import labinfer
from labinfer.config import (
    SECTIONS,
    EngineOptions,
    JobOptions,
    ParallelOptions,
    RuntimeOptions,
    SamplingOptions,
    convert,
    flag_name,
    join,
)
from labinfer.errors import ExitStatus, UserError
from labinfer.plan import SamplingParams
from labinfer.spmd.environment import detect

if TYPE_CHECKING:
    from labinfer.commands.session import Session

REPEATED = ("prompt", "stop")
"""Flags that may be given several times."""

EPILOG = """examples:
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


def main(argv: list[str] | None = None) -> int:
    """Run one command on this rank; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    rank = 0
    try:
        environment = detect()
        rank = environment.rank
        args = _parse(arguments, rank)
        options = EngineOptions.from_flat(_given(args, *SECTIONS))
        command = _choose_command(args)
    except UserError as error:
        if rank == 0:  # every rank was given the same flags
            sys.stderr.write(f"labinfer: error: {error}\n")
        return ExitStatus.USAGE

    from labinfer.commands.session import Session, set_up_logging
    from labinfer.executor.failure import end_process_with

    set_up_logging(rank)
    session = Session(environment, options)
    try:
        return command(session)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends the group
        end_process_with(error, session.group, rank)


def build_parser() -> Parser:
    description = "Distributed large-language-model inference. The same command starts every rank."
    parser = Parser(
        prog="launch.py",
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"labinfer {labinfer.__version__}")
    parser.set_defaults(command="generate")
    for section in (JobOptions, SamplingOptions, *SECTIONS):
        add_options(parser, section)
    commands = parser.add_subparsers(title="other commands", metavar="{plan,bench}")
    plan = commands.add_parser("plan", help="show which rank would hold what", allow_abbrev=False)
    plan.set_defaults(command="plan")
    for section in SECTIONS:
        add_options(plan, section)
    bench = commands.add_parser("bench", help="measure this machine", allow_abbrev=False)
    kinds = bench.add_subparsers(title="what to measure", metavar="{comm}", required=True)
    comm = kinds.add_parser(
        "comm", help="latency and bandwidth of every collective and send in use", allow_abbrev=False
    )
    comm.set_defaults(command="bench comm")
    for section in (ParallelOptions, RuntimeOptions):
        add_options(comm, section)
    return parser


def add_options(parser: argparse.ArgumentParser, section: type) -> None:
    """A group of flags for a dataclass of options. Values are converted and checked later, all in one place."""
    group = parser.add_argument_group(section.__name__.removesuffix("Options").lower(), section.__doc__)
    hints = typing.get_type_hints(section)
    for f in dataclasses.fields(section):
        names = [name for name in (f.metadata["short"], flag_name(f.name)) if name]
        text = f.metadata["help"].replace("%", "%%")
        if hints[f.name] is bool:
            group.add_argument(*names, action="store_true", default=None, help=text)
            continue
        if f.default not in ("", 0, ()) and "default" not in text:
            text += f" (default: {join(f.default) if isinstance(f.default, tuple) else f.default})"
        metavar = f.metadata["metavar"] or "|".join(f.metadata["choices"])
        group.add_argument(
            *names, action="append" if f.name in REPEATED else "store", default=None, metavar=metavar, help=text
        )


def _parse(arguments: list[str], rank: int) -> argparse.Namespace:
    if rank == 0:
        return build_parser().parse_args(arguments)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # --help is printed once
        return build_parser().parse_args(arguments)


def _given(args: argparse.Namespace, *sections: type) -> dict[str, Any]:
    """The options that were given, by field name."""
    names = [f.name for section in sections for f in dataclasses.fields(section)]
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def _choose_command(args: argparse.Namespace) -> Callable[[Session], int]:
    """The function that runs the chosen command, with its own options checked."""
    if args.command == "bench comm":
        from labinfer.commands import bench_comm

        return bench_comm.run
    if not args.model:
        raise UserError("--model is missing; give a checkpoint directory or a model's name")
    if args.command == "plan":
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
