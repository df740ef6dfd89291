"""JobFiles: the files that rank 0 reads and writes, opened before anything heavy is imported or loaded."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.batch.fingerprint import input_fingerprint, options_fingerprint
from labinfer.batch.job_output import JobOutput
from labinfer.batch.reader import JsonlReader
from labinfer.config import EngineOptions, JobOptions
from labinfer.errors import UserError
from labinfer.observe.output_file import OutputFile
from labinfer.sampling_params import SamplingParams


@dataclass(frozen=True)
class JobFiles:
    """Input, output and report of a job."""

    reader: JsonlReader | None
    output: JobOutput
    report: OutputFile | None
    num_lines: int | None
    """Lines of the input; None of a pipe, which has no end yet."""

    @classmethod
    def open(cls, job: JobOptions, options: EngineOptions, sampling: SamplingParams) -> JobFiles:
        """Raises:
        UserError: a file cannot be read or written, is given twice, or has what the job would destroy.
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
