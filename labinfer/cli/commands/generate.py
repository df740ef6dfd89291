"""The ``generate`` command: prompts from the command line or a JSONL file, with answers on the terminal or in a JSONL file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from labinfer.api.batch.job_files import JobFiles
from labinfer.api.batch.options import JobOptions
from labinfer.api.batch.progress import JobProgress
from labinfer.api.batch.recorded_job import RecordedRun
from labinfer.api.llm import LLM
from labinfer.base.errors import ExitStatus, Interrupted
from labinfer.base.sampling_params import SamplingParams
from labinfer.base.standard_error import terminal_columns, write_error
from labinfer.cli.commands.loading import announce, load
from labinfer.cli.commands.prompt_answers import PromptAnswers
from labinfer.cli.commands.session import Session
from labinfer.engine.request import Request
from labinfer.launch.fingerprint import Fingerprint
from labinfer.observe.output_file import STANDARD, tell_written
from labinfer.requests.outputs import Completion
from labinfer.requests.prompts import ChatPrompt, Prompt, TextPrompt

logger = logging.getLogger(__name__)


def run(session: Session, job: JobOptions, sampling: SamplingParams, files: JobFiles | None = None) -> int:
    """Answer prompts or run a JSONL job, on every rank; returns the exit status.

    Args:
        files: open files of the job on rank 0; None if they are not open yet, as opening them may block.

    Raises:
        CollectiveError: the job cannot run, or the output cannot be written; on every rank.
    """
    group = session.join()
    with contextlib.ExitStack() as at_end:
        with group.raise_on_all_ranks():
            if group.rank == 0:
                files = files or JobFiles.open(job, session.options, sampling)
                at_end.callback(files.output.close)
        return _run(session, job, sampling, files)


def _run(session: Session, job: JobOptions, sampling: SamplingParams, files: JobFiles | None) -> int:
    """Run the job with the open files of rank 0; see ``run``.

    Raises:
        CollectiveError: as ``run``.
    """
    group, llm = session.group, load(session)
    prompts: list[Prompt] = []
    requests: list[Request] = []
    with group.raise_on_all_ranks():
        if group.rank == 0:
            prompts = _read_prompts(llm, job)
            requests = [llm.make_request(index, prompt, sampling) for index, prompt in enumerate(prompts)]
            fingerprint = llm.fingerprint.with_defaults(msgspec.to_builtins(sampling))
            recorded = RecordedRun(fingerprint, msgspec.to_builtins(sampling), os.path.abspath(job.input))
            files.output.begin(llm.files.identity, recorded)  # may raise, as no rank waits for plans yet
    status = ExitStatus.OK
    session.signals.running = True
    with group.raise_on_all_ranks():  # rank 0 may fail to write; then the other ranks must not wait for it
        if group.rank == 0:
            status = Rank0Job(
                llm=llm, session=session, job=job, sampling=sampling, files=files, fingerprint=fingerprint
            ).run(prompts, requests)
        else:
            llm.follow()
    llm.close()
    session.signals.running = False  # from here on, a signal may interrupt a wait
    return 128 + session.signals.signum if session.signals.signum else status


@dataclass(frozen=True, kw_only=True)
class Rank0Job:
    """The part of a job that runs on rank 0, while the other ranks take part in the steps."""

    llm: LLM
    session: Session
    job: JobOptions
    sampling: SamplingParams
    files: JobFiles
    fingerprint: Fingerprint

    def run(self, prompts: list[Prompt], requests: list[Request]) -> int:
        """Run the job: write results as they arrive, and a report at the end."""
        announce({self.session.options.model.model: self.llm})
        output = self.files.output
        if output.digests:
            logger.info("resuming: %d lines are already done", len(output.digests))
        job, model, is_interrupted = None, self.session.options.model.model, False
        try:
            if self.files.reader is not None:
                from labinfer.api.batch.job import BatchJob

                progress = JobProgress(self.job.progress, self.llm.clock, self.files.num_lines, len(output.digests))
                as_text = self.job.output_format == "text"
                job = BatchJob(
                    self.files.reader,
                    output,
                    progress,
                    defaults=self.sampling,
                    model_name=model,
                    fingerprint=self.fingerprint,
                    as_text=as_text,
                )
                job.run(self.llm, self.session.signals.check)
            else:
                self._answer(prompts, requests)
        except Interrupted as interrupt:
            if interrupt.signum == signal.SIGPIPE:  # the reader of the answers is gone
                self.session.signals.signum = signal.SIGPIPE
                return ExitStatus.OK
            hint = "; continue with --resume" if self.files.output.is_journaled else ""
            logger.info("interrupted; finished results are written%s", hint)
            is_interrupted = True
        report = self.llm.report
        report.fingerprint = self.fingerprint.digest
        has_run = report.num_finished or (job is not None and job.num_failed)
        is_informed = logger.isEnabledFor(logging.INFO)
        if report.num_finished:
            summary = report.summary()
        elif has_run:
            summary = "no more results" if output.digests else "no results"
        elif is_interrupted:
            summary = "no result was finished"
        elif output.digests:
            summary = f"nothing to do: all {len(output.digests)} lines are already done"
        else:
            summary = f"--input {self.job.input} is empty; nothing to do"
        end = "; interrupted" if is_interrupted and not is_informed else ""
        write_error(
            "\n" + report.format(terminal_columns()) + "\n"
            if has_run and is_informed
            else f"labinfer: {summary}{end}\n"
        )
        if (has_run or output.digests) and self.job.output not in ("", STANDARD):
            logger.info("results%s are in %s", " so far" if is_interrupted else "", self.job.output)
        if self.files.report is not None:
            self.files.report.begin()
            self.files.report.write(json.dumps(report.as_dict() | self._origin(), indent=2) + "\n")
        tell_written(self.job.report, self.session.options.observe.trace)
        num_failed = output.num_failed + (job.num_failed if job is not None else 0)
        if num_failed:
            total = len(output.digests) + job.num_failed + job.num_answered
            logger.warning("%d of %d lines failed; see the errors in their results", num_failed, total)
            return ExitStatus.SOME_FAILED
        return ExitStatus.OK

    def _origin(self) -> dict[str, Any]:
        """Fields that the report has for ``verify``: the fingerprint of the answers, and the paths of input and output."""
        names = {"input": self.job.input, "output": self.job.output}
        return {
            "reproducible": self.fingerprint.reproducible,
            "fingerprint": self.fingerprint.digest,
            "fingerprint_parts": self.fingerprint.parts,
            **{name: path and os.path.abspath(path) if path != STANDARD else "" for name, path in names.items()},
        }

    def _answer(self, prompts: list[Prompt], requests: list[Request]) -> None:
        """Answer the prompts of --prompt: write each finished answer to a file, or stream the answers to the
        terminal."""
        titles = self.job.prompt if len(self.job.prompt) > 1 else ("",) * len(prompts)
        answers = PromptAnswers(titles, self.files.output.write_text)
        streams = not self.job.output and self.sampling.can_stream and self.sampling.n == 1
        on_delta = answers.grow if streams else None
        cut: Counter[str] = Counter()
        with (
            contextlib.closing(answers),
            contextlib.closing(self.llm.run(requests, self.session.signals.check, on_delta)) as outputs,
        ):
            for output in outputs:
                if not self.job.output:
                    answers.end(output, has_grown=streams)
                    cut.update(self._limit(answer) for answer in output.completions if answer.finish_reason == "length")
                else:
                    from labinfer.api.batch.records import result_record
                    from labinfer.requests.jsonl import ParsedLine

                    line = ParsedLine(prompts=[prompts[output.key]], sampling=self.sampling)
                    record = result_record(
                        output.key + 1,
                        line,
                        output,
                        model=self.session.options.model.model,
                        fingerprint=self.fingerprint,
                        tokenizer=self.llm.tokenizer,
                    )
                    self.files.output.write(record, output.key + 1)
        for limit, count in sorted(cut.items()):
            logger.warning("%s truncated: %s", "1 output" if count == 1 else f"{count} outputs", limit)

    def _limit(self, answer: Completion) -> str:
        """Text that names the limit that truncated ``answer``: its ``max_tokens`` or the context length."""
        if len(answer.token_ids) == self.sampling.max_tokens:
            return f"--max-tokens {self.sampling.max_tokens} reached"
        return f"the context of {self.llm.spec.max_model_len} tokens is full"


def _read_prompts(llm: LLM, job: JobOptions) -> list[Prompt]:
    """The prompts of --prompt. If the model has a chat template, each becomes a conversation with one message."""
    as_chat = not job.raw and llm.tokenizer is not None and llm.tokenizer.has_chat_template
    return [ChatPrompt([{"role": "user", "content": text}]) if as_chat else TextPrompt(text) for text in job.prompt]
