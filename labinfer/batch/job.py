"""A batch job: lines in, requests through the engine, lines out. Runs on rank 0."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labinfer.batch.reader import JsonlReader
from labinfer.batch.records import error_record, result_record
from labinfer.engine.request import Request
from labinfer.errors import UserError
from labinfer.llm import LLM
from labinfer.observe.output_file import OutputFile
from labinfer.observe.progress_line import ProgressLine
from labinfer.plan import SamplingParams
from labinfer.protocol import ParsedLine, custom_id_of, own_id_of, parse_line


@dataclass(frozen=True)
class JobLine:
    """An input line that became a request."""

    number: int
    parsed: ParsedLine


class BatchJob:
    """Exactly one output line for every input line, in the order in which they finish.

    Args:
        defaults: sampling of lines that do not say otherwise.
        model_name: for the ``model`` field of batch results.
    """

    def __init__(self, reader: JsonlReader, output: OutputFile, defaults: SamplingParams, model_name: str):
        self._reader, self._output, self._defaults, self._model_name = reader, output, defaults, model_name
        self._line = ProgressLine()
        self.num_failed = 0

    def run(self, llm: LLM, check: Callable[[], None]) -> None:
        """Run to the end of the input. ``check`` may raise ``Interrupted``; what has finished is written by then."""
        begin = time.monotonic()

        def each_step() -> None:
            check()
            if self._line.due():
                rate = llm.report.output_tokens / (time.monotonic() - begin)
                self._line.update(f"{llm.report.num_finished} done, {llm.engine.describe()}, {rate:.1f} tokens/s")

        try:
            with contextlib.closing(llm.run(self._requests(llm, each_step), each_step)) as outputs:
                for output in outputs:
                    line: JobLine = output.key
                    self._output.write_json(
                        result_record(line.number, line.parsed, output, self._model_name, llm.tokenizer)
                    )
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
            try:
                parsed = parse_line(text, self._defaults)
                yield llm.make_request(
                    JobLine(number, parsed), parsed.prompt, parsed.sampling, parsed.priority, parsed.user
                )
            except UserError as error:
                self._output.write_json(error_record(number, custom_id_of(text), own_id_of(text), str(error)))
                self.num_failed += 1
