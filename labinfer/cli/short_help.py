"""The program's ``--help``: commands, names of all options by group, and examples. ``--help-all`` explains every option."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping

COLUMNS = 80
"""Maximum width of the help in columns; on a narrower terminal the help is as wide as the terminal."""
COMMAND_COLUMNS, NARROW_COLUMNS = 28, 60
"""Width of the column with the commands, before their summaries. On a terminal narrower than ``NARROW_COLUMNS``, each
summary gets lines of its own."""
EXAMPLES = """{alone} --prompt "17 + 25 = ?"
{alone} serve --model Qwen/Qwen3-0.6B
torchrun --nproc-per-node 4 {script} --model Qwen/Qwen3-0.6B -tp 2 -pp 2 --prompt "Hello"
mpirun -n 2 {alone} --model Qwen/Qwen3-0.6B --input in.jsonl --output out.jsonl"""
EXIT_STATUS = "exit status: 0 all done, 1 some requests failed, 2 wrong usage, 70 a rank failed, 130 Ctrl-C, 141 output closed, 143 SIGTERM"
JOBS = {
    "--prompt TEXT": "answer a prompt (without --model: the bundled model)",
    "--input FILE": "answer every line of a JSONL file",
}
"""Descriptions of the options for which no command's name is needed, by option."""
HELP_ALL = "--help-all"


class HelpAction(argparse.Action):
    """Prints the short help and exits.

    Args:
        describe: returns the text of the short help.
    """

    def __init__(self, option_strings: list[str], dest: str, *, describe: Callable[[], str], help: str):
        super().__init__(option_strings, dest="help", default=argparse.SUPPRESS, nargs=0, help=help)
        self._describe = describe

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        print(self._describe())
        parser.exit()


def format_short_help(
    program: str,
    description: str,
    *,
    summaries: Mapping[str, str],
    groups: Iterable[argparse._ArgumentGroup],
    alone: str,
    script: str,
) -> str:
    """Format the short help, as wide as the terminal but at most ``COLUMNS``.

    Args:
        description: the first paragraph, after the usage line.
        summaries: one-line summary of each command, by the command as the user types it (``bench KIND``).
        groups: argparse groups with all options of the command ``generate``.
        alone: command that starts the program without a launcher, for the examples.
        script: words that follow torchrun's flags, for the examples.
    """
    columns = min(COLUMNS, shutil.get_terminal_size((COLUMNS, 0)).columns)
    lines = [f"usage: {program} COMMAND [OPTION …]", "", *_wrap(description, columns), "", "commands:"]
    for command, summary in {**JOBS, **summaries}.items():
        first = f"  {program} {command}"
        if columns < NARROW_COLUMNS:
            lines += [first, *_wrap(summary, columns, " " * 6, 6)]
        else:
            lines += _wrap(summary, columns, f"{first:<{COMMAND_COLUMNS}} ", COMMAND_COLUMNS + 1)
    lines += [
        "",
        *_wrap(f"{program} help COMMAND explains the options of a command.", columns),
        *_wrap(f"Options of --prompt and --input, which {program} {HELP_ALL} explains:", columns),
    ]
    for group in groups:
        if names := [_shortest(action) for action in group._group_actions if _is_listed(action)]:
            lines += _wrap(" ".join(names), columns, f"  {group.title}: ", 4)
    lines += ["", "examples:"]
    for example in EXAMPLES.format(alone=alone, script=script).splitlines():
        lines += _wrap(example, columns, "  ", 6)
    return "\n".join([*lines, "", *_wrap(EXIT_STATUS, columns)])


def _is_listed(action: argparse.Action) -> bool:
    """Whether the short help lists the option ``action``. Not listed are options that print help, and negated flags
    such as ``--no-autotune``."""
    return action.dest not in ("help", "version") and type(action) is not argparse._StoreConstAction


def _shortest(action: argparse.Action) -> str:
    """The flag of an option with a single hyphen if there is one, else the flag with the option's name."""
    flags = action.option_strings
    named = "--" + action.dest.replace("_", "-")
    return next((flag for flag in flags if not flag.startswith("--")), named if named in flags else flags[0])


def _wrap(text: str, columns: int, first: str = "", indent: int = 0) -> list[str]:
    """Break ``text`` into lines of at most ``columns``. The first line begins with ``first``, all others with ``indent`` spaces."""
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
