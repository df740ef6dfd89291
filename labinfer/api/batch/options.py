"""Options of prompts and jobs."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.option_fields import option

OUTPUT_FORMATS = ("jsonl", "text")
PROGRESS = ("auto", "jsonl", "none")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Prompts or a job, and the files of the results."""

    prompt: tuple[str, ...] = option(
        (), "a prompt; may be given several times. Chat models see it as a user's message", metavar="TEXT"
    )
    raw: bool = option(False, "give --prompt to the model as it is, without its chat template")
    input: str = option("", "JSONL file of requests, - for standard input", metavar="FILE")
    max_line_size: int = option(
        16, "MiB of a line of --input; longer ones are answered with an error", metavar="MIB", least=1
    )
    output: str = option(
        "",
        "JSONL file of results, - for standard output (default for --input); the answers to --input are journaled in "
        "FILE.journal, for --resume",
        metavar="FILE",
    )
    output_format: str = option(
        "jsonl",
        "jsonl, or text: questions and answers of --input for people, at the terminal",
        choices=OUTPUT_FORMATS,
    )
    overwrite: bool = option(False, "empty --output of what an earlier run wrote; without this it is refused")
    resume: bool = option(
        False,
        "go on with an earlier run of the same --input, --output, model and sampling that was broken off, on any layout; "
        "with nothing there yet it begins",
    )
    retry_errors: bool = option(False, "--resume, and try the lines again that have an error for an answer")
    progress: str = option(
        "auto",
        "what is said on standard error while a job runs: a line for people, jsonl with a JSON object each second, or none",
        choices=PROGRESS,
    )
    report: str = option("", "also write the figures of the run to this JSON file", metavar="FILE")
