"""Options of ``generate``: prompts on the command line, or a JSONL job."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.option_fields import option

OUTPUT_FORMATS = ("jsonl", "text")
PROGRESS = ("auto", "jsonl", "none")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What to answer (prompts or a JSONL job), and the output files."""

    prompt: tuple[str, ...] = option(
        (), "prompt, sent as a user message if the model has a chat template; repeatable", metavar="TEXT"
    )
    raw: bool = option(False, "raw text completion: no chat template is applied to --prompt")
    input: str = option("", "JSONL file of requests; - for standard input", metavar="FILE")
    max_line_size: int = option(
        16,
        "maximum length of a line of --input, in MiB; a longer line gets an error as its result",
        metavar="MIB",
        least=1,
    )
    output: str = option(
        "",
        "JSONL file of results, or - for standard output (the default of a job with --input); with a file, progress is "
        "journaled in FILE.journal, for --resume",
        metavar="FILE",
    )
    output_format: str = option(
        "jsonl",
        "jsonl, or text: prompts and outputs of --input in readable form on the terminal",
        choices=OUTPUT_FORMATS,
    )
    overwrite: bool = option(False, "replace an existing --output; without this flag an existing output is an error")
    resume: bool = option(
        False,
        "continue an interrupted run of the same job (--input, --output, model, sampling), on any layout; starts "
        "from scratch if there is no output yet",
    )
    retry_errors: bool = option(False, "as --resume, and retry the lines whose result is an error")
    progress: str = option(
        "auto",
        "progress on standard error: auto (a status line), jsonl (a JSON object per second) or none",
        choices=PROGRESS,
    )
    report: str = option("", "also write the statistics of the run to this JSON file", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The job that ``verify`` checks, and how many of its output lines are recomputed."""

    job: str = option(
        "",
        "output of a job with --reproducible, or its --report; the job's journal is beside the output (no default)",
        metavar="FILE",
    )
    input: str = option("", "input of the job (default: the file that the job has read)", metavar="FILE")
    sample: int = option(
        100,
        "number of output lines to recompute, drawn at random; all of them if there are fewer",
        metavar="N",
        least=1,
    )
    seed: int = option(0, "seed by which the lines are drawn", metavar="N")
