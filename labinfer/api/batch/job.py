"""BatchJob: turns input lines into engine requests, and their results into output lines. Runs on rank 0."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from labinfer.api.batch.job_output import JobOutput
from labinfer.api.batch.journal import line_digest
from labinfer.api.batch.progress import JobProgress
from labinfer.api.batch.reader import JsonlReader, LongLine
from labinfer.api.batch.records import describe_record, embedding_record, error_record, result_record, score_record
from labinfer.api.llm import LLM
from labinfer.base.errors import UserError, is_failure
from labinfer.base.pooling import EmbeddingOutput
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import Request
from labinfer.launch.fingerprint import Fingerprint
from labinfer.requests.embedding import PromptEmbedding
from labinfer.requests.jsonl import ParsedLine, parse_line, read_ids
from labinfer.requests.outputs import RequestOutput
from labinfer.requests.scoring import Classification, PairScoring

logger = logging.getLogger(__name__)

MAX_REASON = 200
"""Maximum length, in characters, of an exception's text in an error record."""
MAX_WARNINGS = 20
"""Maximum number of warnings of a job; further warnings are not logged."""
MAX_IDS = 1 << 20
"""Maximum number of ``id``s of simple lines (``SimpleLine``) that are kept in memory to detect duplicates."""


@dataclass(frozen=True)
class JobLine:
    """An input line of a job, and the outputs of the line's requests. An embeddings or classification line has a request for each
    input, a line of scores one for each pair of texts (of embeddings, one for each text), every other line one request."""

    number: int
    digest: bytes
    """Digest of the line; see ``line_digest``."""
    parsed: ParsedLine
    work: PromptEmbedding | PairScoring | Classification | None = None
    """What the line's pooled prompts are computed for; None for lines that generate text."""
    outputs: dict[int, RequestOutput | EmbeddingOutput] = field(default_factory=dict)
    """Outputs of the line's finished requests, by the index of the prompt in the line."""


class BatchJob:
    """Runs the requests of a job's input lines, and writes exactly one output line per input line, in completion order.

    Args:
        defaults: default sampling parameters.
        model_name: value of the field ``model`` in output lines: the model that runs, whatever model a line requests.
        fingerprint: digest of all that the answers depend on, for the output lines.
        as_text: whether to write prompts and answers as readable text instead of JSONL.
    """

    def __init__(
        self,
        reader: JsonlReader,
        output: JobOutput,
        progress: JobProgress,
        *,
        defaults: SamplingParams,
        model_name: str,
        fingerprint: Fingerprint,
        as_text: bool = False,
    ):
        self._as_text, self._fingerprint = as_text, fingerprint
        self._reader, self._output, self._progress = reader, output, progress
        self._defaults, self._model_name = defaults, model_name
        self._base_name = os.path.basename(os.path.abspath(model_name))
        self._custom_ids: dict[str, int] = {}  # custom_id to line number
        self._ids: set[str | int] = set()  # ids of simple lines
        self._warnings: set[str] = set()  # kinds of warnings that were logged
        self.num_answered = self.num_failed = 0  # counts of lines
        self._allowed_tokens = 0  # sum of ``max_tokens`` of answered lines, each limited by the context length

    def run(self, llm: LLM, check: Callable[[], None]) -> None:
        """Run the job to the end of its input. ``check`` is called in every step; if it raises ``Interrupted``, the output then has
        all lines that were finished before."""

        def each_step() -> None:
            check()
            if self._progress.due():
                self._show_progress(llm)

        try:
            with contextlib.closing(llm.run(self._requests(llm, each_step), each_step)) as outputs:
                for output in outputs:
                    line, index = output.key
                    line.outputs[index] = output
                    if len(line.outputs) < len(line.parsed.prompts):
                        continue
                    if isinstance(output, RequestOutput) and output.error:
                        self._refuse(line.number, line.digest, (line.parsed.custom_id, line.parsed.id), output.error)
                    else:
                        self._write(self._record(line, llm), line.number, line.digest, line.parsed)
                        self.num_answered += 1
                        self._allowed_tokens += _allowed_tokens(line, llm.spec.max_model_len)
        finally:
            if self._progress.is_for_machines:
                self._show_progress(llm)  # the final record of progress
            self._progress.close()
            llm.report.num_failed = self.num_failed

    def _show_progress(self, llm: LLM) -> None:
        self._progress.show(
            num_done=self.num_answered + self.num_failed,
            num_failed=self.num_failed,
            output_tokens=llm.report.output_tokens,
            allowed_tokens=self._allowed_tokens,
            generated_tokens=llm.report.generated_tokens,
            load=llm.engine.load(),
        )

    def _requests(self, llm: LLM, each_line: Callable[[], None]) -> Iterator[Request | None]:
        for line in self._reader:
            if line is None:
                yield None
                continue
            each_line()  # while one line after another is invalid, no step runs
            number, text = line
            digest = line_digest(b"%d" % text.num_bytes if isinstance(text, LongLine) else text)
            ids = (None, None) if isinstance(text, LongLine) else read_ids(text)
            first, is_duplicate = self._first_line(number, ids[0]), self._is_duplicate(ids[1])
            if self._is_done(number, digest):
                continue
            if is_duplicate:
                self._warn(number, f"its id {ids[1]!r:.40} is a duplicate of an earlier line; make ids unique", "id")
            if isinstance(text, LongLine):
                message = f"the line has {text.num_bytes} bytes, more than --max-line-size; shorten it"
                self._refuse(number, digest, ids, message)
                continue
            try:
                if first != number:
                    raise UserError(f"custom_id is a duplicate of line {first}; make custom_ids unique")
                parsed = parse_line(text, self._defaults)
                requests = self._make_requests(llm, number, digest, parsed)
            except UserError as error:
                self._refuse(number, digest, ids, str(error))
            except BaseException as error:
                if not is_failure(error):
                    raise
                logger.error("line %d fails\n%s", number, traceback.format_exc().rstrip())
                self._refuse(number, digest, ids, f"it fails with {type(error).__name__}: {str(error)[:MAX_REASON]}")
            else:
                self._check_model(number, parsed.model)
                for text in parsed.warnings:
                    self._warn(number, text, text)
                yield from requests

    def _check_model(self, number: int, asked: str | None) -> None:
        """Log a warning if a line requests another model than the one that runs."""
        if asked not in (None, self._model_name) and os.path.basename(asked) != self._base_name:
            self._warn(number, f"model {asked!r:.80} requested, using {self._model_name!r}", "model")

    def _is_duplicate(self, own_id: str | int | None) -> bool:
        """Whether an earlier simple line has the id ``own_id``. Only the first ``MAX_IDS`` ids are checked."""
        if own_id in self._ids:
            return True
        if own_id is not None and len(self._ids) < MAX_IDS:
            self._ids.add(own_id)
        return False

    def _warn(self, number: int, text: str, kind: str) -> None:
        """Log a warning about input line ``number``, unless a warning of this ``kind`` was logged before."""
        if kind not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(kind)
            self._progress.close()
            logger.warning("line %d: %s (shown once)", number, text)

    def _refuse(self, number: int, digest: bytes, ids: tuple[str | None, str | int | None], message: str) -> None:
        """Write the error record of input line ``number``, which is invalid or has failed. ``ids`` are the line's ``custom_id`` and
        ``id``, see ``read_ids``."""
        self._write(error_record(number, *ids, message), number, digest)
        self.num_failed += 1

    def _write(self, record: dict[str, Any], number: int, digest: bytes, parsed: ParsedLine | None = None) -> None:
        """Write the output record of input line ``number``.

        Args:
            parsed: the parsed line; None if the line is invalid.
        """
        if self._output.is_terminal:
            self._progress.close()  # the progress line is shown again below the record
        if self._as_text:
            self._output.write_text(describe_record(record, number, parsed))
        else:
            self._output.write(record, number, digest, failed=parsed is None)

    def _is_done(self, number: int, digest: bytes) -> bool:
        """Whether an earlier run of the job has answered input line ``number``.

        Raises:
            UserError: line ``number`` had another digest in that run.
        """
        before = self._output.digests.get(number)
        if before not in (None, digest):
            raise UserError(
                f"--resume: line {number} differs from the line of the earlier run; use --overwrite to start over"
            )
        return before is not None

    def _first_line(self, number: int, custom_id: str | None) -> int:
        """Number of the first input line with this ``custom_id``: ``number`` itself if no earlier line has the id, or if
        ``custom_id`` is None."""
        return number if custom_id is None else self._custom_ids.setdefault(custom_id, number)

    @staticmethod
    def _make_requests(llm: LLM, number: int, digest: bytes, parsed: ParsedLine) -> list[Request]:
        """Make the engine requests of a line.

        Raises:
            UserError: a request of the line can never run; then no request of the line is made.
        """
        work = None
        if parsed.embedding is not None or parsed.scoring is not None:
            work = parsed.embedding.embedding(llm.spec) if parsed.embedding else parsed.scoring.work(llm.spec)
            parsed = replace(parsed, prompts=work.prompts(), pooling=work.pooled_by)
        line = JobLine(number, digest, parsed, work)
        return [
            llm.make_request((line, index), prompt, parsed.sampling, **parsed.request_fields)
            for index, prompt in enumerate(parsed.prompts)
        ]

    def _record(self, line: JobLine, llm: LLM) -> dict[str, Any]:
        outputs = [line.outputs[index] for index in range(len(line.parsed.prompts))]
        if line.parsed.embedding is not None:
            return embedding_record(line.number, line.parsed, line.work.outputs(outputs), self._model_name)
        if line.work is not None:
            return score_record(line.number, line.parsed, line.work, outputs, self._model_name)
        return result_record(
            line.number,
            line.parsed,
            outputs[0],
            model=self._model_name,
            fingerprint=self._fingerprint,
            tokenizer=llm.tokenizer,
        )


def _allowed_tokens(line: JobLine, max_model_len: int) -> int:
    """Maximum output tokens of all answers of a line together; 0 for embeddings."""
    outputs = [output for output in line.outputs.values() if isinstance(output, RequestOutput)]
    sampling = line.parsed.sampling
    rooms = (max_model_len - len(output.prompt_token_ids) for output in outputs)
    return sum(sampling.num_choices * min(sampling.max_tokens, room) for room in rooms)
