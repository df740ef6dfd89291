"""A batch job: lines in, requests through the engine, lines out. Runs on rank 0."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from labinfer.batch.reader import JsonlReader, LongLine
from labinfer.batch.records import embedding_record, error_record, result_record
from labinfer.engine.request import Request
from labinfer.errors import UserError, is_failure
from labinfer.jsonl import ParsedLine, parse_line, read_ids
from labinfer.llm import LLM
from labinfer.observe.output_file import OutputFile
from labinfer.observe.progress_line import ProgressLine
from labinfer.outputs import RequestOutput
from labinfer.pooling import EmbeddingOutput
from labinfer.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_REASON = 200
"""Characters of what a library says of its own failure."""


@dataclass(frozen=True)
class JobLine:
    """An input line that became a request, or one for each of its inputs."""

    number: int
    parsed: ParsedLine
    num_requests: int
    outputs: dict[int, RequestOutput | EmbeddingOutput] = field(default_factory=dict)
    """Outputs of finished requests, by their place in the line."""


class BatchJob:
    """Exactly one output line for every input line, in the order in which they finish.

    Args:
        defaults: sampling of lines that do not say otherwise.
        model_name: for the ``model`` field of batch results.
    """

    def __init__(self, reader: JsonlReader, output: OutputFile, defaults: SamplingParams, model_name: str):
        self._reader, self._output, self._defaults, self._model_name = reader, output, defaults, model_name
        self._line = ProgressLine()
        self.num_answered = self.num_failed = 0  # lines

    def run(self, llm: LLM, check: Callable[[], None]) -> None:
        """Run to the end of the input. ``check`` may raise ``Interrupted``; what has finished is written by then."""
        begin = llm.clock()

        def each_step() -> None:
            check()
            if self._line.due():
                rate = llm.report.output_tokens / (llm.clock() - begin)
                self._line.update(f"{llm.report.num_finished} done, {llm.engine.describe()}, {rate:.1f} tokens/s")

        try:
            with contextlib.closing(llm.run(self._requests(llm, each_step), each_step)) as outputs:
                for output in outputs:
                    line, index = output.key
                    line.outputs[index] = output
                    if len(line.outputs) == line.num_requests:
                        self._output.write_json(self._record(line, llm))
                        self.num_answered += 1
        finally:
            self._line.close()
            llm.report.num_failed = self.num_failed

    def _requests(self, llm: LLM, each_line: Callable[[], None]) -> Iterator[Request | None]:
        for line in self._reader:
            if line is None:
                yield None
                continue
            each_line()  # a job may have nothing but bad lines for a long time
            number, text = line
            if isinstance(text, LongLine):
                self._refuse(number, b"", f"the line has {text.num_bytes} bytes, more than --max-line-size; shorten it")
                continue
            try:
                requests = self._make_requests(llm, number, parse_line(text, self._defaults))
            except UserError as error:
                self._refuse(number, text, str(error))
            except BaseException as error:
                if not is_failure(error):
                    raise
                logger.error("line %d fails\n%s", number, traceback.format_exc().rstrip())
                self._refuse(number, text, f"it fails with {type(error).__name__}: {str(error)[:MAX_REASON]}")
            else:
                yield from requests

    def _refuse(self, number: int, text: bytes, message: str) -> None:
        self._output.write_json(error_record(number, *read_ids(text), message))
        self.num_failed += 1

    @staticmethod
    def _make_requests(llm: LLM, number: int, parsed: ParsedLine) -> list[Request]:
        """Raises:
        UserError: one of the line's requests can never run; then none of them is.
        """
        prompts, pooling = [parsed.prompt], ""
        if (body := parsed.embedding) is not None:
            body.check_dimensions(llm.facts.hidden_size)
            prompts, pooling = body.prompts(), body.pooling
        line = JobLine(number, parsed, len(prompts))
        return [
            llm.make_request(
                (line, index),
                prompt,
                parsed.sampling,
                cache_salt=parsed.cache_salt,
                priority=parsed.priority,
                user=parsed.user,
                pooling=pooling,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _record(self, line: JobLine, llm: LLM) -> dict[str, Any]:
        outputs = [line.outputs[index] for index in range(line.num_requests)]
        if line.parsed.embedding is not None:
            return embedding_record(line.number, line.parsed, outputs, self._model_name)
        return result_record(line.number, line.parsed, outputs[0], self._model_name, llm.tokenizer)
