"""SimulatedModel: the real engine over a simulated executor, with the part of the ``LLM`` interface that benchmarks use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from labinfer.base.config import CacheOptions, SchedulerOptions
from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.base.tracer import Tracer
from labinfer.comm.spmd.topology import Topology
from labinfer.engine.assemble import make_engine
from labinfer.engine.driver import EngineDriver
from labinfer.engine.llm_engine import LLMEngine
from labinfer.engine.request import Request
from labinfer.engine.spec import EngineSpec
from labinfer.observe.output_file import OutputFile
from labinfer.observe.report import RunReport
from labinfer.planner.simulator.clock import VirtualClock
from labinfer.planner.simulator.executor import SimulatedExecutor
from labinfer.planner.simulator.plan_times import TimeSource
from labinfer.requests.offline_runner import OfflineRunner
from labinfer.requests.outputs import Delta, RequestOutput
from labinfer.requests.prompts import PromptLike, TokensPrompt, parse_prompt


class SimulatedModel:
    """A model without weights on a virtual clock; see ``labinfer.cli.bench.model.BenchModel``.

    Args:
        source: times of micro-batches.
        trace: file for the trace at the end of a run; None for no trace.
        num_slices: trace slices to record per rank.
    """

    def __init__(
        self,
        spec: EngineSpec,
        topology: Topology,
        source: TimeSource,
        *,
        cache: CacheOptions,
        scheduling: SchedulerOptions,
        trace: OutputFile | None = None,
        num_slices: int = 0,
    ):
        self.clock, self.spec = VirtualClock(), spec
        executor = SimulatedExecutor(topology, source, self.clock, vocab_size=spec.vocab_size, capacity=num_slices)
        self.engine: LLMEngine = make_engine(spec, executor, cache=cache, scheduling=scheduling, clock=self.clock)
        recorder = Tracer()
        driver = EngineDriver(self.engine, self.clock, recorder)
        self._runner = OfflineRunner(driver, self.clock, recorder, spec=spec, tokenizer=None, trace=trace)

    @property
    def report(self) -> RunReport:
        """Report of the run in progress, or else of the last run."""
        return self._runner.report

    def make_request(self, key: Any, prompt: PromptLike, sampling: SamplingParams) -> Request:
        """A checked request for ``prompt``, a list of token ids.

        Raises:
            UserError: the request can never run, or needs a model with weights.
        """
        typed, extras = parse_prompt(prompt)
        if not isinstance(typed, TokensPrompt):
            raise UserError("a simulation has no tokenizer; give prompt_token_ids")
        if sampling.num_beams > 1 or sampling.structured_outputs is not None:
            raise UserError("beam search and structured_outputs depend on the generated tokens and cannot be simulated")
        request = Request(key=key, prompt_token_ids=typed.token_ids, sampling=sampling, **extras)
        self.engine.check_request(request)
        return request

    def run(
        self,
        requests: Iterable[Request | None],
        check: Callable[[], None] = lambda: None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield outputs as they finish; see ``LLM.run``."""
        return self._runner.outputs(requests, check, on_delta)
