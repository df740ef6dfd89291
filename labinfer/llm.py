"""``LLM``: the offline Python API, the same under any launcher.

    from labinfer import LLM, SamplingParams

    llm = LLM(model="path/to/checkpoint", tensor_parallel_size=2)
    outputs = llm.generate(["Hello"], SamplingParams(max_tokens=16))

Every rank runs the same lines; rank 0 gets the list of outputs and the others None, as in an MPI gather. ``with LLM(…)
as llm:`` or ``llm.close()`` makes the ranks leave together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from labinfer.clock import Clock, SystemClock
from labinfer.config import EngineOptions
from labinfer.engine.assemble import make_engine
from labinfer.engine.driver import EngineDriver, News
from labinfer.engine.facts import EngineFacts
from labinfer.engine.llm_engine import LLMEngine
from labinfer.engine.request import FinishReason, Request
from labinfer.errors import UserError
from labinfer.executor.build import RankParts, build_rank
from labinfer.executor.spmd import SpmdExecutor, StatsReporter, follow
from labinfer.group.failure import end_group_on_uncaught
from labinfer.group.rank_group import RankGroup, join_group
from labinfer.input_processor import InputProcessor, pair_prompts
from labinfer.layout.kv_capacity import KVCapacity
from labinfer.layout.layout import Layout
from labinfer.observe.output_file import OutputFile
from labinfer.observe.report import RunReport
from labinfer.observe.trace import write_trace
from labinfer.outputs import Delta, RequestOutput, RequestState
from labinfer.plan import POOLINGS
from labinfer.pooling import EmbeddingOutput
from labinfer.prompts import PromptLike, parse_prompt
from labinfer.rank_stats import WorkerStats
from labinfer.sampling_params import SamplingParams
from labinfer.spmd.environment import detect
from labinfer.spmd.topology import Place
from labinfer.text.guidance import GuideMaker
from labinfer.text.reply_format import choose_format, describe_choice
from labinfer.text.tokenizer import Tokenizer
from labinfer.weights.read_ahead import start_reading_ahead
from labinfer.worker.logits_processors.registry import check_processors, find_processors

logger = logging.getLogger(__name__)


class LLM:
    """A loaded model on this group of ranks.

    Args:
        model: a directory, or a name as ``--model`` takes it; ``demo`` comes with LABInfer.
        options: any option of ``launch.py --help`` with underscores, such as ``tensor_parallel_size=2``.

    Raises:
        UserError: an option, the model or the layout is wrong; on every rank.
    """

    def __init__(self, model: str = "demo", **options: Any):
        checked, environment = EngineOptions.from_flat({"model": model, **options}), detect()
        if environment.is_one_node:
            start_reading_ahead(
                checked.model.model, environment.model_dir, environment.local_rank, environment.local_world_size
            )
        group = join_group(environment, checked.parallel, checked.runtime)
        end_group_on_uncaught(group)
        self._build(group, checked, lambda done, total: None)

    @classmethod
    def from_options(
        cls,
        group: RankGroup,
        options: EngineOptions,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        others: tuple[LLM, ...] = (),
    ) -> LLM:
        """An LLM over a group that was joined before.

        Args:
            on_progress: ``on_progress(done, total)`` counts loaded tensors.
            others: the group's models so far, if it is to be run beside them by ``follow_all``.
        """
        llm = cls.__new__(cls)
        llm._build(group, options, on_progress, others)
        return llm

    def _build(
        self,
        group: RankGroup,
        options: EngineOptions,
        on_progress: Callable[[int, int], None],
        others: tuple[LLM, ...] = (),
    ) -> None:
        self.group = group
        self.options = options
        self.clock: Clock = SystemClock()
        channel = others[0]._parts.channel if others and not others[0].is_spare else None
        with self.group.together():
            if self.is_rank0:  # refuses a file that cannot be used before anything is loaded
                choose_format(options.model.response_template, None, "")
        self._parts = parts = build_rank(self.group, options, on_progress, channel, shares_channel=bool(others))
        self.report = RunReport()
        self.tokenizer: Tokenizer | None = None
        self._trace: OutputFile | None = None
        self._closed = self._broken = False
        if parts is not None:
            self.facts = _facts(parts)
        with self.group.together():
            if self.is_rank0:
                own = options.model.tokenizer
                self._inputs = InputProcessor(
                    Path(own) if own else parts.directory,
                    required=bool(own),
                    max_prompt_tokens=self.facts.max_model_len,
                    response_template=options.model.response_template,
                )
                self.tokenizer = self._inputs.tokenizer
                self._processors = find_processors()
                if self.tokenizer is not None and self.tokenizer.has_chat_template:
                    told = describe_choice(self.tokenizer.reply_format, options.model.response_template)
                    logger.log(logging.DEBUG if self.tokenizer.reply_format else logging.INFO, told)
                if path := options.observe.trace:
                    self._trace = OutputFile(path, "--trace")
        if self.is_rank0:
            self._executor = SpmdExecutor(
                parts.channel, parts.worker, parts.pipeline, parts.stats, parts.recorder, model=len(others)
            )
            self.guides = GuideMaker(self._inputs.need_tokenizer, self.facts.vocab_size, self.facts.eos_token_ids)
            self.engine: LLMEngine = make_engine(
                self.facts,
                self._executor,
                cache=options.cache,
                scheduling=options.scheduler,
                clock=self.clock,
                recorder=parts.recorder,
                guides=self.guides,
            )
            self.driver = EngineDriver(self.engine, self.clock, parts.recorder)

    # The parts of this rank, by what they say.

    @property
    def is_rank0(self) -> bool:
        return self.group.rank == 0

    @property
    def is_spare(self) -> bool:
        """Whether this rank has no part of the model (``--ranks``): its calls return at once, but ``close``."""
        return self._parts is None

    @property
    def directory(self) -> Path:
        """The checkpoint's."""
        return self._parts.directory

    @property
    def layout(self) -> Layout:
        """Topology, devices and dtypes of all ranks."""
        return self._parts.layout

    @property
    def place(self) -> Place:
        """This rank's part of the layout."""
        return self._parts.place

    @property
    def capacity(self) -> KVCapacity:
        """KV blocks, as all ranks have agreed on them."""
        return self._parts.capacity

    @property
    def stats(self) -> StatsReporter:
        """Counters of this rank."""
        return self._parts.stats

    def record_steps(self, num_slices: int) -> None:
        """Have this rank record where the time of its steps goes, from now to the end of the run; on every rank.

        Args:
            num_slices: at most; what comes after them is dropped.
        """
        if not self.is_spare:
            self._parts.recorder.capacity = num_slices

    def generate(
        self,
        prompts: PromptLike | list[PromptLike] | None,
        params: SamplingParams | list[SamplingParams] | None = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> list[RequestOutput] | None:
        """Generate for every prompt. Collective: every rank calls it; only rank 0's arguments count.

        Args:
            prompts: one prompt or a list of them, see ``PromptLike``.
            params: one for all or one for each prompt.
            on_delta: called with what each answer gets, as it gets it; a ``Delta.key`` is the prompt's index.

        Returns:
            Outputs in the order of the prompts on rank 0, None on the others.

        Raises:
            UserError: a prompt or a parameter is wrong; on rank 0, before anything has run.
        """
        if not self.is_rank0:
            self.follow()
            return None
        try:
            requests = self._make_requests(prompts, params)
            if on_delta is not None:
                for request in requests:
                    _check_can_stream(request)
        except UserError:
            self._executor.end_run([])  # the others are in this call too
            raise
        return sorted(self.run(requests, on_delta=on_delta), key=lambda output: output.key)

    def embed(
        self, prompts: PromptLike | list[PromptLike] | None, pooling: str = "last", normalize: bool = True
    ) -> list[EmbeddingOutput] | None:
        """One vector for every prompt, of its final hidden states. Collective as ``generate`` is.

        Args:
            prompts: one prompt or a list of them, see ``PromptLike``.
            pooling: "last" takes the last token's hidden state, "mean" the mean over all tokens.
            normalize: whether the vectors are divided by their length.

        Returns:
            Outputs in the order of the prompts on rank 0, None on the others.

        Raises:
            UserError: a prompt or the pooling is wrong; on rank 0, before anything has run.
        """
        if not self.is_rank0:
            self.follow()
            return None
        try:
            if pooling not in POOLINGS:
                raise UserError(f"pooling must be one of {', '.join(POOLINGS)}, not {pooling!r:.60}")
            requests = self._make_requests(prompts, None, pooling)
        except UserError:
            self._executor.end_run([])  # the others are in this call too
            raise
        outputs = sorted(self.run(requests), key=lambda output: output.key)
        return [output.normalized() for output in outputs] if normalize else outputs

    def make_request(
        self,
        key: Any,
        prompt: PromptLike,
        sampling: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        user: str = "",
        pooling: str = "",
    ) -> Request:
        """Tokenize and check a prompt (rank 0). For ``key`` and all that is given by name see ``Request``; a dictionary's
        own fields go before these.

        Raises:
            UserError: the prompt or a parameter is wrong.
        """
        typed, extras = parse_prompt(prompt)
        fields = {"cache_salt": cache_salt, "priority": priority, "user": user} | extras
        request = self._inputs.process(key, typed, sampling, pooling=pooling, **fields)
        self._inputs.check_form(request)
        self.check_processors(request)
        self.engine.check_request(request)
        return request

    def check_processors(self, request: Request) -> None:
        """Raises:
        UserError: one of the request's own logits processors is none, or refuses its argument.
        """
        check_processors(
            request.sampling.logits_processors, request.prompt_token_ids, self.facts.vocab_size, self._processors
        )

    def run(
        self,
        requests: Iterable[Request | None],
        check: Callable[[], None] = lambda: None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Iterator[RequestOutput | EmbeddingOutput]:
        """Rank 0: yield outputs as they finish, while the other ranks ``follow``.

        Args:
            requests: taken one by one, as the engine has room to look at them; None where there is none yet.
            check: called every step; may raise ``Interrupted``.
            on_delta: called with what each answer gets, as it gets it.
        """
        if self._broken:
            raise UserError("an earlier run of this LLM was broken off; make a new LLM")
        driver, recorder = self.driver, self._parts.recorder
        self.report = report = RunReport()
        before = self.engine.scheduler.counts.copy()
        begin = self.clock()
        try:
            for news in driver.run(self._open(requests, on_delta is not None), check):
                with recorder.slice("detokenise"):
                    finished = self._advance(news, on_delta)
                for output in finished:
                    self._count(report, output)
                    yield output
        except (Exception, GeneratorExit):
            if driver.is_broken:
                self._broken = True
            else:
                driver.drain()
            raise
        except BaseException:  # Ctrl-C, wherever it came
            self._broken = True
            raise
        finally:
            if not self._broken:
                report.wall_time = self.clock() - begin
                report.counts = self.engine.scheduler.counts.copy()
                report.counts.subtract(before)
                report.workers = self.end_run()

    def end_run(self) -> list[WorkerStats]:
        """Rank 0: end a run, on the other ranks, too. Returns what each of them did, and writes the trace if wanted."""
        workers = self.engine.end_run()
        if self._trace is not None:
            write_trace(self._trace, workers)
        return workers

    def follow(self) -> None:
        """Ranks other than 0: take part until rank 0's run ends."""
        follow_all([self])

    def close(self) -> None:
        """Leave the group in an orderly way; collective. The LLM is of no use afterwards."""
        if not self._closed:
            self._closed = True
            if self.is_rank0:
                self._inputs.close()
                self._parts.channel.close()
            self.group.close(patient=self.is_spare)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:  # after a failure the others are not where a collective could meet them
            self.close()

    # Rank 0's side of a run.

    def _open(self, requests: Iterable[Request | None], streams: bool) -> Iterator[tuple[RequestState, Request] | None]:
        """Each request with its state."""
        for request in requests:
            if request is None:
                yield None
                continue
            if streams:
                _check_can_stream(request)
            yield RequestState(request, self.tokenizer, streams, self.clock), request

    def _advance(self, news: News, on_delta: Callable[[Delta], None] | None) -> list[RequestOutput | EmbeddingOutput]:
        """Turn the news of a step into text; returns the outputs of the requests that are done with it."""
        finished = []
        for state, update in news:
            if state.add(update):
                self.driver.abort(state, update.index, FinishReason.STOP)
            if on_delta is not None:
                on_delta(state.take_delta(update.index))
            if state.is_done:
                finished.append(state.output())
        return finished

    @staticmethod
    def _count(report: RunReport, output: RequestOutput | EmbeddingOutput) -> None:
        report.num_finished += 1
        report.prompt_tokens += len(output.prompt_token_ids)
        if isinstance(output, EmbeddingOutput):
            return
        report.output_tokens += output.num_output_tokens
        report.time_to_first_token.append(output.time_to_first_token)
        if output.time_per_output_token:
            report.time_per_output_token.append(output.time_per_output_token)

    def _make_requests(self, prompts: Any, params: Any, pooling: str = "") -> list[Request]:
        requests = []
        for index, (prompt, sampling) in enumerate(pair_prompts(prompts, params)):
            try:
                requests.append(self.make_request(index, prompt, sampling, pooling=pooling))
            except UserError as error:
                raise UserError(f"prompt {index}: {error}") from None
        return requests


def follow_all(llms: list[LLM]) -> None:
    """Ranks other than 0: take part until rank 0's runs of all these models of the group have ended."""
    parts = [llm._parts for llm in llms if not llm.is_spare]
    if not parts:
        return
    follow(parts[0].channel, [(part.worker, part.stats, part.recorder) for part in parts])


def _facts(parts: RankParts) -> EngineFacts:
    config = parts.layout.config
    return EngineFacts(
        num_stages=parts.layout.topology.num_stages,
        num_blocks=parts.capacity.num_blocks,
        num_host_blocks=parts.capacity.num_host_blocks,
        num_states=parts.capacity.num_states,
        num_host_states=parts.capacity.num_host_states,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_model_len=parts.layout.max_model_len,
        eos_token_ids=config.eos_token_ids,
        step_times=parts.step_times,
    )


def _check_can_stream(request: Request) -> None:
    if not request.sampling.can_stream:
        raise UserError(
            "best_of and num_beams cannot stream: the best are known at the end; leave them or on_delta out"
        )
