"""JobFiles: the files of a job, which rank 0 opens before heavy imports and before it loads the model."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass

from labinfer.api.batch.fingerprint import input_fingerprint, options_fingerprint
from labinfer.api.batch.job_output import JobOutput
from labinfer.api.batch.options import JobOptions
from labinfer.api.batch.reader import JsonlReader
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.observe.output_file import OutputFile

QUICK_BYTES = 256 << 20
"""Maximum size, in bytes, of an input file that rank 0 hashes before it joins the other ranks: even from a slow disk, they do not
wait long."""


def open_quickly(job: JobOptions) -> bool:
    """Whether the files of a job can be opened without delay: opening a pipe blocks until another process opens it for writing, and
    hashing a long file takes time."""
    for path in filter(None, (job.input, job.output)):
        with contextlib.suppress(OSError):  # JobFiles.open reports the error
            status = os.stat(path)
            if stat.S_ISFIFO(status.st_mode) or stat.S_ISCHR(status.st_mode) or status.st_size > QUICK_BYTES:
                return False
    return True


@dataclass(frozen=True)
class JobFiles:
    """Input, output and report files of a job."""

    reader: JsonlReader | None
    output: JobOutput
    report: OutputFile | None
    num_lines: int | None
    """Number of non-blank input lines; None if the input is not a regular file."""

    @classmethod
    def open(cls, job: JobOptions, options: EngineOptions, sampling: SamplingParams) -> JobFiles:
        """Open the files of a job.

        Raises:
            UserError: a file cannot be read or written, is named by two options, or is an output file whose content the
                job would overwrite.
        """
        reader = JsonlReader(job.input, job.max_line_size << 20) if job.input else None
        others = {"--input": job.input, "--trace": options.observe.trace}
        file, num_lines = input_fingerprint(job.input) if job.output else ({}, None)
        given = {"input": file, "options": options_fingerprint(options, sampling)}
        output = JobOutput(job, others, given)
        try:
            report = OutputFile(job.report, "--report", others | {"--output": job.output}) if job.report else None
        except UserError:
            output.close()
            raise
        return cls(reader, output, report, num_lines)
