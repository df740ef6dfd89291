"""Command-line parsers. Flags are generated from dataclasses of options, so that each option is defined once."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import itertools
import os
import re
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import labinfer
from labinfer.base.errors import UserError
from labinfer.base.option_fields import flag_name, is_switch, join
from labinfer.base.other_engines import NEAR, SAME_OPTIONS, suggest
from labinfer.base.sampling_options import SamplingOptions, sampling_sections
from labinfer.cli.command_table import COMMANDS, REPEATABLE, commands
from labinfer.cli.short_help import HELP_ALL, HelpAction, format_short_help

HANDLED_FIRST = ("help", "bench")
"""First words of a command line that are not in the table of commands: they are handled before the table is read."""


def check_command(name: str, command: Callable[..., int], details: Mapping[str, Any]) -> None:
    """Refuse a plugin's command whose name, help or options are invalid.

    Raises:
        UserError: the message says what is allowed.
    """
    if name in HANDLED_FIRST or name.startswith("-"):
        raise UserError("this word is reserved on the command line; choose another name")
    if not isinstance(details.get("help", ""), str):
        raise UserError(f"help must be a string, not {details['help']!r:.60}")
    options = details.get("options", ())
    if not isinstance(options, (tuple, list)) or not all(map(dataclasses.is_dataclass, options)):
        raise UserError(f"options must be a tuple of dataclasses, not {options!r:.60}")
    for section in options:
        for f in dataclasses.fields(section):
            if "help" not in f.metadata:
                raise UserError(
                    f"the field {f.name} of {section.__name__} must be made with option(…) from labinfer.base.option_fields"
                )


QUOTES, DASHES = "“”‘’＂＇„«»", "—–―－‐−"
"""Characters that keyboards and word processors put in place of quotes and hyphens."""
QUOTES_HINT = "shells know only the quotes \" and ', not “ and ”"

PLUGIN_HELP = (
    "plugin to load on every rank: a Python file (needed on rank 0 only), the name of a file in lab/, or an installed module; repeatable, "
    "see docs/extending.md (default: none)"
)
PROGRAM = "launch.py"
"""Default name of the program in messages."""
PROGRAMS = {PROGRAM: ("python launch.py", "launch.py"), "labinfer": ("labinfer", "-m labinfer")}
"""For each name of the program: words that start it in one process, and words that follow torchrun's flags."""


class UsageError(UserError):
    """The flags of the command line are invalid."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``UsageError`` instead of printing, so that only rank 0 prints errors."""

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse_args(self, arguments: list[str]) -> argparse.Namespace:  # type: ignore[override]
        args, unknown = self.parse_known_args(arguments)
        if unknown:
            flag = unknown[0].partition("=")[0]
            _check_hyphens(flag)
            if not flag.startswith("-"):
                is_command = any(name.split()[0] == flag for name in commands())
                hint = "commands come first" if is_command else "put quotes around a text with spaces"
                if any(argument[:1] in QUOTES for argument in arguments if argument):
                    hint = QUOTES_HINT
                self.error(f"unexpected {unknown[0]!r}; {hint}")
            self.error(f"unknown option {flag}{suggest(flag, self._option_string_actions)}")
        return args

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Overrides argparse's search for abbreviated flags, which ignores ``allow_abbrev`` for -tp and -pp: -t 4 would mean -tp
        4."""
        return [match for match in super()._get_option_tuples(option_string) if match[1] == option_string[:2]]


def program_name(argument: str) -> str:
    """Name by which the program was started; ``argument`` is the first argument of the process."""
    return "labinfer" if os.path.basename(argument) in ("labinfer", "__main__.py") else PROGRAM


def build_parser(command: str = "generate", program: str = PROGRAM) -> Parser:
    """Build the parser of a command in ``commands()``. A command line without a command's name is for ``generate``.

    Args:
        program: name of the program in messages, a key of ``PROGRAMS``.
    """
    flags, sections = commands()[command], commands()[command].options
    alone, script = PROGRAMS[program]
    is_plain = command == "generate"
    parser = Parser(
        prog=program if is_plain else f"{program} {command}",
        description=flags.description.replace(f"python {PROGRAM}", alone).replace(PROGRAM, program),
        add_help=False,
        allow_abbrev=False,
    )
    describe = functools.partial(_describe_program, parser, program) if is_plain else parser.format_help
    parser.add_argument(
        "-h",
        "--help",
        action=HelpAction,
        describe=describe,
        help="show a summary" if is_plain else "show this help",
    )
    parser.add_argument(
        HELP_ALL,
        action=HelpAction,
        describe=parser.format_help,
        help="explain every option" if is_plain else argparse.SUPPRESS,  # --help of a command does so, too
    )
    parser.add_argument(
        "--version", action="version", help="show the version", version=f"labinfer {labinfer.__version__}"
    )
    if command != "supervise":  # supervise needs no plugins: the command that it starts loads them
        parser.add_argument("--plugin", action="append", metavar="FILE|MODULE|NAME", help=PLUGIN_HELP)
    if SamplingOptions in sections:
        sections += sampling_sections()[1:]
    try:
        for section in sections:
            add_options(parser, section, flags.repeated, flags.defaults, flags.left_out, positional=flags.positional)
    except argparse.ArgumentError as error:  # caused by a plugin; tests exclude conflicts of built-in flags
        raise UsageError(f"a plugin adds a flag that already exists: {error}") from None
    return parser


def _describe_program(parser: Parser, program: str) -> str:
    """Text of the short help, which ``--help`` prints if the command line names no command.

    Args:
        parser: parser of ``generate``.
    """
    alone, script = PROGRAMS[program]
    kinds = [name.removeprefix("bench ") for name in COMMANDS if name.startswith("bench ")]
    summaries = {
        "supervise -- …" if name == "supervise" else name: known.summary
        for name, known in commands().items()
        if known.summary
    }
    return format_short_help(
        program,
        parser.description,
        summaries=summaries | {"bench KIND": f"measure: {', '.join(kinds[:-1])} or {kinds[-1]}"},
        groups=parser._action_groups,
        alone=alone,
        script=script,
    )


def build_bench_parser(program: str = PROGRAM) -> Parser:
    """Build the parser of ``bench`` without a benchmark's name, which only prints help."""
    kinds = {name: flags.description for name, flags in COMMANDS.items() if name.startswith("bench ")}
    lines = [f"  {program} {name:<17} {description[0].lower()}{description[1:]}" for name, description in kinds.items()]
    return Parser(
        prog=f"{program} bench",
        description="Benchmark the engine or the machine. Each kind has its own --help.",
        epilog="\n".join(["kinds:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse_arguments(arguments: list[str], program: str, rank: int = 0) -> tuple[str, argparse.Namespace]:
    """Parse a command line. Returns the command's name and its flags; exits after ``--help`` and ``--version``.

    Args:
        program: name of the program in messages.
        rank: rank of this process; only rank 0 prints the help.

    Raises:
        UsageError: the command or a flag is unknown or incomplete.
    """
    with contextlib.ExitStack() as stack:
        if rank != 0:  # only one rank prints --help
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        if arguments[:1] == ["bench"] and all(word.startswith("-") for word in arguments[1:]):
            parser = build_bench_parser(program)
            parser.parse_args(arguments[1:])
            kinds = [name.removeprefix("bench ") for name in COMMANDS if name.startswith("bench ")]
            parser.error(f"bench needs a kind, one of {', '.join(kinds)}")
        command, flags = split_command(arguments)
        return command, build_parser(command, program).parse_args(flags)


def split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """Split the command line into the command's name and the arguments after it.

    Raises:
        UsageError: the first words do not name a command.
    """
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    command = " ".join(words) or "generate"
    known = commands()
    if words and words[0] in known and known[words[0]].positional:
        return words[0], arguments[1:]
    if command not in known:
        for word in words:
            _check_hyphens(word)
        for name in known:
            if words[: len(name.split())] == name.split():
                word = words[len(name.split())]
                raise UsageError(f"{name}: unexpected {word!r}; to choose a model, use --model {word}")
        if any(" " in word for word in words):
            raise UsageError(f"unknown command {command!r:.80}; to run a prompt, use --prompt {command!r:.80}")
        names = [name for name in known if name != "generate"]
        if near := difflib.get_close_matches(command, names, n=1, cutoff=NEAR):
            raise UsageError(f"unknown command {command!r} (did you mean {near[0]}?)")
        raise UsageError(
            f"unknown command {command!r}; commands: {', '.join(names)}; without a command, --prompt or --input is run"
        )
    return command, arguments[len(words) :]


def _check_hyphens(word: str) -> None:
    """Check that a word of the command line does not begin with a typographic dash.

    Raises:
        UsageError: ``word`` begins with a dash in place of a hyphen.
    """
    if word.startswith(tuple(DASHES)):
        raise UsageError(
            f"unknown option {word}: it begins with a typographic dash; options begin with two hyphens, --"
        )


def add_options(
    parser: argparse.ArgumentParser,
    section: type,
    repeated: tuple[str, ...] = REPEATABLE,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    left_out: tuple[str, ...] = (),
    *,
    positional: str = "",
) -> None:
    """Add the flags of a dataclass of options, as one group of the help. Values are converted and checked later.

    Args:
        repeated: fields whose flags may be given several times.
        defaults: defaults that replace those of the dataclass.
        left_out: fields that do not become flags.
        positional: field that is given without a flag.
    """
    words = re.findall("[A-Z][a-z]+", section.__name__.removesuffix("Options"))
    group = parser.add_argument_group(" ".join(words).lower(), section.__doc__.replace("``", ""))
    hints = typing.get_type_hints(section)
    for f in dataclasses.fields(section):
        if f.name in left_out:
            continue
        if f.name == positional:
            group.add_argument(f.name, metavar=f.metadata["metavar"], help=f.metadata["help"])
            continue
        names = [name for name in (f.metadata["other_name"], flag_name(f.name)) if name]
        default = defaults.get(f.name, f.default)
        text = f.metadata["help"].replace("%", "%%")
        if "default" not in text:
            text += f" (default: {_describe_default(f.name, default, defaults)})"
        if hints[f.name] is bool:  # a boolean option that is on by default gets a negated flag
            action = argparse.BooleanOptionalAction if f.default else "store_true"
            group.add_argument(*names, dest=f.name, action=action, default=None, help=text)
            continue
        if is_switch(f):
            values = "|".join(f.metadata["choices"])
            group.add_argument(*names, nargs="?", const="on", default=None, metavar=values, help=text)
            group.add_argument(
                f"--no-{names[-1][2:]}",
                dest=f.name,
                action="store_const",
                const="off",
                help=f"{names[-1]} off (default: no)",
            )
            continue
        metavar = f.metadata["metavar"] or "|".join(f.metadata["choices"])
        kind = "append" if f.name in repeated else "store"
        aliases = [flag_name(alias) for alias, name in SAME_OPTIONS.items() if name == f.name]
        action = group.add_argument(
            *names, *aliases, dest=f.name, action=kind, default=None, metavar=metavar, help=text
        )
        action.option_strings = names  # aliases are accepted, but help and errors name only these flags


def _describe_default(name: str, default: Any, own: Mapping[str, Any]) -> str:
    """Describe the default of an option in words.

    Args:
        own: defaults of the command; an empty string means that the model's files decide.
    """
    if own.get(name) == "":
        return "the model's"
    if isinstance(default, bool):
        return "on" if default else "off"
    if default in ("", ()) or default is None:
        return "none"
    return join(default) if isinstance(default, tuple) else f"{default}"
