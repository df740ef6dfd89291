"""check_own: checks the options of one command. given_options: options that the user has set."""

from __future__ import annotations

import argparse
import dataclasses
import os
import typing
from typing import Any

from labinfer.api.batch.options import JobOptions
from labinfer.base.config import SECTIONS, ModelOptions
from labinfer.base.errors import UserError
from labinfer.base.option_fields import check_bounds, convert, convert_section
from labinfer.base.registry import REGISTRY
from labinfer.base.sampling_options import as_flags, sampling_sections
from labinfer.base.sampling_params import SamplingParams
from labinfer.cli.command_table import REPEATABLE, commands
from labinfer.cli.terminal.options import ChatOptions
from labinfer.observe.output_file import STANDARD


def given_options(args: argparse.Namespace, *sections: type) -> dict[str, Any]:
    """Options of ``sections`` that the user has set on the command line, by field name."""
    names = [f.name for section in sections for f in dataclasses.fields(section)]
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def check_own(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Check a command's own options. Returns the arguments that its ``run`` receives in addition to the session."""
    if name == "generate":
        job, sampling = check_job(args)
        return {"job": job, "sampling": sampling}
    if name == "chat":
        sampling, _ = sampling_options(args)  # check_files raises before the model is loaded
        return {"own": convert_section(ChatOptions, given_options(args, ChatOptions)), "sampling": sampling}
    own = [
        convert_section(section, given_options(args, section))
        for section in commands()[name].options
        if section not in SECTIONS
    ]
    for section in own:
        check_bounds(section)
    if REGISTRY.entry("command", name).origin:
        return {"options": own} if own else {}
    if len(own) == 1:
        return {"own": own[0]}
    return {"kind": name.removeprefix("bench "), "options": own} if own else {}


def take_models(args: argparse.Namespace) -> dict[str, str]:
    """Models of ``serve --model [NAME=]DIR|NAME``, by the names that requests use. The first model remains in ``args``.

    Raises:
        UserError: a name is missing or not unique.
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
            raise UserError(f"--model {text}: the name {name} is already in use; give another one, as in NAME={model}")
        models[name] = model
    args.model = next(iter(models.values()))
    return models


def check_job(args: argparse.Namespace) -> tuple[JobOptions, SamplingParams]:
    """Check the options of a job. Returns the options, and the default sampling parameters of the job's requests."""
    job = JobOptions(
        **{
            name: tuple(value) if name in REPEATABLE else value
            for name, value in given_options(args, JobOptions).items()
        }
    )
    if bool(job.prompt) == bool(job.input):
        hint = "not both" if job.prompt else "--help lists all options"
        raise UserError(f"give either --prompt TEXT or --input FILE; {hint}")
    if job.overwrite and (job.resume or job.retry_errors):
        raise UserError("--overwrite would delete the output that --resume continues; give one of them")
    check_bounds(job)
    if job.output_format == "text" and (not job.input or job.output not in ("", STANDARD)):
        raise UserError("--output-format text prints the results of --input to the terminal; leave it or --output out")
    if "" in job.prompt:
        raise UserError("--prompt is empty; give some text")
    return job, sampling_options(args)[1]


def sampling_options(args: argparse.Namespace) -> tuple[dict[str, Any], SamplingParams]:
    """Fields of ``SamplingParams`` that the user has set, and the complete ``SamplingParams`` in which all other fields have their
    defaults."""
    sections = sampling_sections()
    hints = {name: hint for section in sections for name, hint in typing.get_type_hints(section).items()}
    given = {
        name: tuple(value)
        if name in REPEATABLE
        else value
        if hints[name] is bool
        else convert(name, value, hints[name])
        for name, value in given_options(args, *sections).items()
    }
    try:
        return given, SamplingParams(**given)
    except UserError as error:
        raise UserError(as_flags(str(error))) from None
