"""The main job: prompts from the command line or a JSONL file, answers to the terminal or a JSONL file."""

from __future__ import annotations

import json
import logging
import sys

from labinfer.batch.job import BatchJob
from labinfer.batch.reader import STANDARD, JsonlReader
from labinfer.batch.records import result_record
from labinfer.batch.writer import JsonlWriter
from labinfer.commands.plan import layout_table
from labinfer.commands.session import Session
from labinfer.config import JobOptions
from labinfer.errors import ExitStatus, Interrupted, UserError
from labinfer.llm import LLM, Request
from labinfer.observe.progress_line import ProgressLine
from labinfer.observe.table import format_bytes
from labinfer.plan import SamplingParams
from labinfer.protocol import ParsedLine

logger = logging.getLogger(__name__)


def run(session: Session, job: JobOptions, sampling: SamplingParams) -> int:
    """Run the job on every rank; returns the exit status.

    Raises:
        AgreedError: nothing could be run, or the output could not be written; on every rank.
    """
    group = session.join()
    reader = writer = None
    with group.together():
        if group.rank == 0:
            reader = JsonlReader(job.input) if job.input else None
            writer = JsonlWriter(job.output or STANDARD, job.input) if job.input or job.output else None
            _check_writable(job.report)
    loading = ProgressLine()
    llm = LLM.from_options(group, session.options, lambda done, total: _show_loading(loading, group.rank, done, total))
    loading.close()
    requests: list[Request] = []
    with group.together():
        if group.rank == 0:
            requests = _make_requests(llm, job, sampling)
    status = ExitStatus.OK
    with group.together():  # rank 0 may fail to write; the others must not wait for it then
        if group.rank == 0:
            _announce(llm)
            status = _run_rank0(llm, session, job, sampling, reader, writer, requests)
        else:
            llm.follow()
    llm.close()
    return 128 + session.signals.signum if session.signals.signum else status


def _run_rank0(
    llm: LLM,
    session: Session,
    job: JobOptions,
    sampling: SamplingParams,
    reader: JsonlReader | None,
    writer: JsonlWriter | None,
    requests: list[Request],
) -> int:
    if writer is not None:
        writer.begin()
    try:
        if reader is not None:
            batch = BatchJob(reader, writer, sampling, session.options.model.model)
            batch.run(llm, session.signals.check)
        else:
            _answer(llm, session, job, sampling, requests, writer)
    except Interrupted:
        logger.info("interrupted; what was finished is written")
    report = llm.report
    sys.stdout.flush()
    sys.stderr.write("\n" + report.format() + "\n")
    if job.report:
        with open(job.report, "w", encoding="utf-8") as file:
            json.dump(report.as_dict(), file, indent=2)
    if report.num_failed:
        logger.info(
            "%d of %d lines failed; their output lines say why",
            report.num_failed,
            report.num_failed + report.num_finished,
        )
        return ExitStatus.SOME_FAILED
    return ExitStatus.OK


def _announce(llm: LLM) -> None:
    """The table of ranks, and what the KV cache holds."""
    parts, block_size = llm.parts, llm.options.cache.block_size
    sys.stderr.write(
        layout_table(parts.layout, llm.group.everyone, [parts.num_kv_blocks * block_size] * llm.group.size) + "\n"
    )
    size = format_bytes(parts.num_kv_blocks * parts.layout.block_bytes(parts.place, block_size))
    logger.info(
        "KV cache: %d blocks of %d tokens on every rank (%s on rank 0); context %d",
        parts.num_kv_blocks,
        block_size,
        size,
        parts.layout.max_model_len,
    )


def _show_loading(line: ProgressLine, rank: int, done: int, total: int) -> None:
    if rank == 0 and line.due():
        line.update(f"loading weights: {done}/{total} tensors {'#' * (20 * done // total):.<20}")


def _check_writable(report: str) -> None:
    if report:
        try:
            with open(report, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise UserError(f"cannot write --report {report}: {error.strerror}") from None


def _make_requests(llm: LLM, job: JobOptions, sampling: SamplingParams) -> list[Request]:
    """The requests of --prompt."""
    as_chat = not job.raw and llm.tokenizer is not None and llm.tokenizer.has_chat_template
    prompts = [
        {"messages": [{"role": "user", "content": text}]} if as_chat else {"prompt": text} for text in job.prompt
    ]
    return [llm.make_request(index, prompt, sampling) for index, prompt in enumerate(prompts)]


def _answer(
    llm: LLM,
    session: Session,
    job: JobOptions,
    sampling: SamplingParams,
    requests: list[Request],
    writer: JsonlWriter | None,
) -> None:
    """Print each answer, or write it where --output says."""
    for output in sorted(llm.run(requests, session.signals.check), key=lambda output: output.key):
        if writer is not None:
            line = ParsedLine(job.prompt[output.key], sampling)
            writer.write(result_record(output.key + 1, line, output, session.options.model.model))
        else:
            title = f"--- {job.prompt[output.key]}\n" if len(job.prompt) > 1 else ""
            print(f"{title}{output.text}", flush=True)
