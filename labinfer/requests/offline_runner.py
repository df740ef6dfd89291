"""OfflineRunner: runs requests on rank 0's engine, and yields their deltas and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import msgspec

from labinfer.base.clock import Clock
from labinfer.base.errors import UserError
from labinfer.base.pooling import EmbeddingOutput
from labinfer.base.rank_stats import WorkerStats
from labinfer.base.tracer import Tracer
from labinfer.comm.group.signals import interrupts_held
from labinfer.engine.driver import EngineDriver, StepOutputs
from labinfer.engine.request import FinishReason, Request
from labinfer.engine.spec import EngineSpec
from labinfer.observe.output_file import OutputFile
from labinfer.observe.report import RunReport
from labinfer.observe.trace import write_trace
from labinfer.requests.outputs import Delta, RequestOutput, RequestState
from labinfer.text.tokenizer import Tokenizer

Outputs = list[RequestOutput | EmbeddingOutput]


class OfflineRunner:
    """Runs requests on rank 0's engine. The other ranks take part in the steps.

    If a run is interrupted (by Ctrl-C, or by an error of its caller), its requests are aborted, so that the next run
    starts with an empty engine.

    Args:
        spec: parameters of the engine.
        tokenizer: the checkpoint's tokenizer; None if it has none.
        trace: file to which ``end`` writes the trace of the run; None if no trace was requested.
        on_begin: called on rank 0 when a run begins.
    """

    def __init__(
        self,
        driver: EngineDriver,
        clock: Clock,
        recorder: Tracer,
        *,
        spec: EngineSpec,
        tokenizer: Tokenizer | None,
        trace: OutputFile | None = None,
        on_begin: Callable[[], None] = lambda: None,
    ):
        self._driver, self._engine, self._clock, self._recorder = driver, driver.engine, clock, recorder
        self._spec, self._tokenizer, self._trace, self._on_begin = spec, tokenizer, trace, on_begin
        self.report = RunReport()
        """Report of the run in progress, or else of the last run."""

    def outputs(
        self,
        requests: Iterable[Request | None],
        check: Callable[[], None] = lambda: None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Iterator[RequestOutput | EmbeddingOutput]:
        """Yield the outputs of requests as they finish; see ``LLM.run``."""
        with contextlib.closing(self._run(requests, check, streams=on_delta is not None)) as steps:
            for deltas, outputs in steps:
                for delta in deltas:
                    on_delta(delta)
                yield from outputs

    def deltas(self, requests: Iterable[Request]) -> Iterator[Delta]:
        """Yield the deltas of requests as they are generated."""
        with contextlib.closing(self._run(requests, lambda: None, streams=True)) as steps:
            for deltas, _ in steps:
                yield from deltas

    def end(self) -> list[WorkerStats]:
        """End a run on all ranks: write the trace if one was requested, and return the statistics of each rank."""
        workers = self._engine.end_run()
        if self._trace is not None:
            write_trace(self._trace, workers, msgspec.to_builtins(self._spec))
        return workers

    def close(self) -> None:
        """Close the trace file."""
        if self._trace is not None:
            self._trace.close()

    def _run(
        self, requests: Iterable[Request | None], check: Callable[[], None], streams: bool
    ) -> Iterator[tuple[list[Delta], Outputs]]:
        """Run requests, and yield for each step the deltas and the outputs of finished requests."""
        driver = self._driver
        if driver.is_broken:
            raise UserError("an earlier run of this LLM failed; create a new LLM")
        self.report = report = RunReport()
        before = self._engine.scheduler.counts.copy()
        self._on_begin()
        begin = self._clock()
        steps = driver.run(self._open(requests, streams), check)
        try:
            while True:
                with interrupts_held():
                    news = next(steps, None)
                if news is None:
                    return
                with self._recorder.slice("detokenise"):
                    deltas, outputs = self._advance(news, streams)
                for output in outputs:
                    _count(report, output)
                yield deltas, outputs
        except BaseException:
            if not driver.is_broken:
                with interrupts_held():
                    driver.drain()
            raise
        finally:
            if not driver.is_broken:
                report.wall_time = self._clock() - begin
                report.counts = self._engine.scheduler.counts.copy()
                report.counts.subtract(before)
                with interrupts_held():
                    report.workers = self.end()

    def _open(self, requests: Iterable[Request | None], streams: bool) -> Iterator[tuple[RequestState, Request] | None]:
        """Yield each request with its new ``RequestState``, as (state, request); None if no request is available
        yet."""
        for request in requests:
            if request is None:
                yield None
                continue
            if streams:
                check_can_stream(request)
            yield RequestState(request, self._tokenizer, streams, self._clock), request

    def _advance(self, step: StepOutputs, streams: bool) -> tuple[list[Delta], Outputs]:
        """Apply the updates of a step to the requests' states. Returns the deltas if ``streams``, and the outputs of
        the requests that the step has finished."""
        deltas, outputs = [], []
        for state, update in step:
            self.report.generated_tokens += len(update.token_ids)
            if state.add(update):
                self._driver.abort(state, update.index, FinishReason.STOP)
            if streams:
                deltas.append(state.take_delta(update.index))
            if state.is_done:
                outputs.append(state.output())
        return deltas, outputs


def check_can_stream(request: Request) -> None:
    """Check that the answers of a request can be streamed.

    Raises:
        UserError: the request has ``best_of`` or ``num_beams``, whose best answers are known only at the end.
    """
    if not request.sampling.can_stream:
        raise UserError(
            "best_of and num_beams cannot stream, as the best outputs are known only at the end; leave them or "
            "on_delta out"
        )


def _count(report: RunReport, output: RequestOutput | EmbeddingOutput) -> None:
    report.num_finished += 1
    report.prompt_tokens += len(output.prompt_token_ids)
    if isinstance(output, EmbeddingOutput):
        return
    report.output_tokens += output.num_output_tokens
    report.time_to_first_token.append(output.time_to_first_token)
    if output.time_per_output_token:
        report.time_per_output_token.append(output.time_per_output_token)
