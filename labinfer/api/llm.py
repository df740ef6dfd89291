"""``LLM``: the offline Python API, identical under every launcher.

    from labinfer import LLM, SamplingParams

    llm = LLM(model="path/to/checkpoint", tensor_parallel_size=2)
    outputs = llm.generate(["Hello"], SamplingParams(max_tokens=16))

All ranks run one script; rank 0 gets the list of outputs and the other ranks None, as in an MPI gather. With ``with LLM(…) as
llm:`` or ``llm.close()`` all ranks leave the group together. Threads may share an LLM: their calls are serialized. Ctrl-C aborts
the running call, and the LLM remains usable. For concurrent requests use ``AsyncLLM``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from labinfer.api.call_lock import CallLock
from labinfer.api.fork_guard import ForkGuard
from labinfer.api.rank0_engine import engine_spec, make_rank0_engine
from labinfer.base.clock import Clock, SystemClock
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.other_engines import as_keywords, read_keywords
from labinfer.base.pooling import EmbeddingOutput
from labinfer.base.rank_stats import WorkerStats
from labinfer.base.sampling_params import SamplingParams
from labinfer.comm.group.failure import end_group_on_uncaught
from labinfer.comm.group.rank_group import RankGroup, join_group
from labinfer.comm.spmd.devices import DeviceName, use_device
from labinfer.comm.spmd.environment import detect
from labinfer.comm.spmd.topology import Place
from labinfer.engine.assemble import make_drafter
from labinfer.engine.driver import EngineDriver
from labinfer.engine.proposers import find_proposer
from labinfer.engine.request import Request
from labinfer.launch.build import build_rank
from labinfer.launch.choose_layout import choose_layout
from labinfer.launch.device_defaults import with_device_defaults
from labinfer.launch.draft_model import LoadedDraftModel
from labinfer.launch.draft_rank import DraftRank
from labinfer.launch.fingerprint import take_fingerprint
from labinfer.launch.layout.kv_capacity import KVCapacity
from labinfer.launch.layout.layout import Layout
from labinfer.launch.prefetch import prefetch_weights
from labinfer.launch.rank_runtime import RankRuntime
from labinfer.observe.output_file import OutputFile
from labinfer.observe.report import RunReport
from labinfer.requests.embedding import PromptEmbedding
from labinfer.requests.input_processor import InputProcessor, conversations, pair_prompts
from labinfer.requests.offline_runner import OfflineRunner, check_can_stream
from labinfer.requests.outputs import Delta, RequestOutput
from labinfer.requests.prompts import PromptLike
from labinfer.requests.scoring import Classification, ClassificationOutput, PairScoring, ScoringOutput, pair_scoring
from labinfer.text.guidance import GrammarGuideMaker
from labinfer.text.reply_format import choose_format, describe_choice
from labinfer.text.tokenizer import Tokenizer
from labinfer.worker.logits_processors.processor import check_logits_processors
from labinfer.worker.spmd import follow
from labinfer.worker.stats_reporter import StatsReporter

logger = logging.getLogger(__name__)


class LLM:
    """A loaded model on this group of ranks.

    Args:
        model: a directory, or a name as in ``--model``; ``demo`` comes with LABInfer.
        plugins: values of ``--plugin``: files and modules that register additional parts; see docs/extending.md.
        options: any option of ``launch.py --help`` with underscores, such as ``tensor_parallel_size=2``.

    Raises:
        UserError: an option, a plugin, the model or the layout is invalid; raised on every rank.
    """

    _fork_guard: ClassVar[ForkGuard] = ForkGuard()
    """The guard against forks, shared by all LLMs of the process."""

    def __init__(self, model: str = "demo", *, plugins: Sequence[str] = (), **options: Any):
        LLM._fork_guard.enter()
        try:
            values, environment = read_keywords({"model": model, **options}), detect()
            if isinstance(plugins, str):
                raise UserError(
                    f"--plugin must be a list of files and modules, not {plugins!r:.60}; give [{plugins!r:.60}]"
                )
            if plugins:  # plugins may add values of options, so ranks load plugins before they check options
                group = join_group(environment, EngineOptions.group_options(values), plugins)
                end_group_on_uncaught(group)
                group.load_plugins(plugins)
                with group.raise_on_all_ranks():
                    checked = EngineOptions.from_flat(values)
                prefetch_weights(environment, checked)
                group.take_cores(checked.working_ranks, checked.runtime.threads)
            else:
                checked = EngineOptions.from_flat(values)
                prefetch_weights(environment, checked)
                group = join_group(environment, checked)
                end_group_on_uncaught(group)
            self._build(
                group, choose_layout(group, with_device_defaults(checked, group.everyone)), lambda done, total: None
            )
        except UserError as error:  # hide the internal traceback from users
            raise type(error)(as_keywords(str(error))) from None

    @classmethod
    def from_options(
        cls,
        group: RankGroup,
        options: EngineOptions,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        others: tuple[LLM, ...] = (),
    ) -> LLM:
        """Load an LLM on the ranks of ``group``, which they have already joined.

        Args:
            on_progress: called as ``on_progress(done, total)``, with the bytes of this rank's weights that are loaded, and of all its weights. Not called
                if the cache of packed weights has all of them.
            others: models that the group loaded earlier, if ``follow_all`` runs them together with this model.
        """
        LLM._fork_guard.enter()
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
        speculation = options.scheduler.speculative_config
        channel = others[0]._parts.channel if others and not others[0].is_spare else None
        with self.group.raise_on_all_ranks():
            if self.is_rank0:  # reject unusable files before weights are loaded
                choose_format(options.model.response_template, None, "")
                make_proposer = find_proposer(speculation) if speculation and not speculation.model else None
        built, self.files = build_rank(self.group, options, on_progress, channel, shares_channel=bool(others))
        self._parts = parts = built if isinstance(built, RankRuntime) else None
        device = parts.layout.devices[self.group.rank] if parts else DeviceName("cpu")
        self.use_device: Callable[[], Any] = partial(use_device, device)
        """Makes this rank's device the calling thread's current device. A thread must call it before it runs steps, unless it is
        the thread that made this object. The function refers only to the device: a reference to this object would be a cycle, and
        keep the weights until the garbage collector runs."""
        self._call_lock, self._closed = CallLock("LLM", self.use_device), False
        self._draft_rank = built if isinstance(built, DraftRank) else None
        if self._draft_rank is not None:
            self._drafter = make_drafter(self._draft_rank.model, cache=options.cache, scheduling=options.scheduler)
        self.tokenizer: Tokenizer | None = None
        trace: OutputFile | None = None
        if parts is not None:
            self.spec = engine_spec(parts)
        self.fingerprint = take_fingerprint(
            group,
            options,
            self.files.identity,
            parts.layout if parts else None,
            parts.kernels if parts else (),
        )
        """Fingerprint of the model, the kernels and the settings, without the sampling defaults of a job."""
        with self.group.raise_on_all_ranks():
            if self.is_rank0:
                own = options.model.tokenizer
                self.inputs = InputProcessor(
                    Path(own) if own else parts.directory,
                    required=bool(own),
                    max_prompt_tokens=self.spec.max_model_len,
                    response_template=options.model.response_template,
                    chat_template=options.model.chat_template,
                )
                self.tokenizer = self.inputs.tokenizer
                if self.tokenizer is not None and self.tokenizer.has_chat_template:
                    told = describe_choice(self.tokenizer.reply_format, options.model.response_template)
                    logger.log(logging.DEBUG if self.tokenizer.reply_format else logging.INFO, told)
                if path := options.observe.trace:
                    trace = OutputFile(path, "--trace")
                proposer = make_proposer(speculation, self.spec) if make_proposer else None
        self.files.check_loaded()
        if self.is_rank0:
            self.guides = GrammarGuideMaker(self.inputs.need_tokenizer, self.spec.vocab_size, self.spec.eos_token_ids)
            self.engine, self._executor = make_rank0_engine(
                self.spec,
                parts,
                options,
                model=len(others),
                clock=self.clock,
                guides=self.guides,
                proposer=proposer,
            )
            self.driver = EngineDriver(self.engine, self.clock, parts.recorder)
            self._runner = OfflineRunner(
                self.driver,
                self.clock,
                parts.recorder,
                spec=self.spec,
                tokenizer=self.tokenizer,
                trace=trace,
                on_begin=parts.stats.begin,
            )

    @property
    def is_rank0(self) -> bool:
        return self.group.rank == 0

    @property
    def is_spare(self) -> bool:
        """Whether this rank holds no part of the model (see ``--ranks``). On such a rank all calls but ``close`` return at once,
        except if the rank holds the draft model."""
        return self._parts is None

    @property
    def directory(self) -> Path:
        """Path of the checkpoint: a directory or a file."""
        return self._parts.directory

    @property
    def layout(self) -> Layout:
        """Layout of the model: topology, devices and dtypes of all ranks."""
        return self._parts.layout

    @property
    def place(self) -> Place:
        """This rank's place in the layout: its stage and tensor-parallel rank."""
        return self._parts.place

    @property
    def capacity(self) -> KVCapacity:
        """Capacity of the KV cache; all ranks have agreed on it."""
        return self._parts.capacity

    @property
    def draft_model(self) -> LoadedDraftModel | None:
        """The draft model if rank 0 holds it; otherwise None."""
        return self._parts.draft_model

    @property
    def stats(self) -> StatsReporter:
        """Reporter of this rank's statistics."""
        return self._parts.stats

    @property
    def report(self) -> RunReport:
        """Report of the run in progress, or else of the last run; on rank 0 only."""
        return self._runner.report

    def record_steps(self, num_slices: int) -> None:
        """Record a trace of this rank's steps until the end of the run. Call it on every rank.

        Args:
            num_slices: maximum number of recorded trace slices; later slices are dropped.
        """
        if not self.is_spare:
            self._parts.recorder.capacity = num_slices

    def generate(
        self,
        prompts: PromptLike | list[PromptLike] | None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> list[RequestOutput] | None:
        """Generate answers to every prompt. Collective: every rank calls it, but only rank 0's arguments count.

        Args:
            prompts: one prompt or a list of them, see ``PromptLike``.
            sampling_params: one object for all prompts, or one object for each.
            on_delta: called with each ``Delta`` as it is generated; ``Delta.key`` is the prompt's index.

        Returns:
            Outputs in the order of the prompts on rank 0, None on the other ranks.

        Raises:
            UserError: a prompt or a parameter is invalid; raised on rank 0 before anything has run.
        """
        return self._generate(lambda: prompts, sampling_params, on_delta)

    def stream(
        self,
        prompts: PromptLike | list[PromptLike] | None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Generate answers, and yield their deltas as they arrive. Collective: every rank iterates; on ranks other than
        0 the iterator is empty.

        Leaving the loop, or closing the iterator, aborts the unfinished requests. For the arguments see ``generate``.

        Raises:
            UserError: as in ``generate``, at the first item.
        """
        self.check_usable()
        steps = self._call(
            lambda: self._make_requests(prompts, sampling_params, streams=True),
            lambda requests: self._runner.deltas(requests),
        )
        return self._call_lock.run(steps)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]] | None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        on_delta: Callable[[Delta], None] | None = None,
        **fields: Any,
    ) -> list[RequestOutput] | None:
        """Answer one conversation or a list of conversations; otherwise like ``generate``.

        Args:
            messages: as in OpenAI's API; formatted by the checkpoint's chat template.
            fields: further fields of a chat prompt, such as ``tools`` and ``chat_template_kwargs``; see ``PromptLike``.
        """
        return self._generate(lambda: conversations(messages, fields), sampling_params, on_delta)

    def embed(
        self,
        prompts: PromptLike | list[PromptLike] | None,
        pooling: str | None = None,
        normalize: bool | None = None,
        **options: Any,
    ) -> list[EmbeddingOutput] | None:
        """Compute the embedding of every prompt: one vector, pooled from the prompt's final hidden states. Collective, like
        ``generate``.

        Args:
            prompts: one prompt or a list of them, see ``PromptLike``.
            pooling: "last" takes the last token's hidden state, "mean" the mean over all tokens, "cls" the first token's; by
                default the method in the model's files, see ``PoolingConfig``.
            normalize: whether to scale the vectors to unit length; by default as the model's files say.
            options: ``dimensions``, ``prompt_name`` and ``truncate_prompt_tokens``, see ``PromptEmbedding``.

        Returns:
            Outputs in the order of the prompts on rank 0, None on the other ranks.

        Raises:
            UserError: a prompt or an option is invalid; raised on rank 0 before anything has run.
        """
        return self._pool(
            lambda: PromptEmbedding(model=self.spec, given=prompts, pooling=pooling, normalize=normalize, **options)
        )

    def score(
        self,
        queries: str | list[str] | None,
        documents: str | list[str] | None = None,
        *,
        use_activation: bool | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling: str | None = None,
    ) -> list[ScoringOutput] | None:
        """Score pairs of texts: one query with each document, or two lists of equal length. Collective, like ``generate``.

        Classifiers with one label and rerankers read both texts together. Scores of embedding models are cosine similarities.

        Args:
            use_activation, instruction, truncate_prompt_tokens, pooling: see ``PairScoring``.

        Returns:
            Outputs in the order of the pairs on rank 0, None on the other ranks.

        Raises:
            UserError: the texts cannot be paired, or the model gives no scores; raised on rank 0 before anything has run.
        """
        options = {
            "use_activation": use_activation,
            "instruction": instruction,
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "pooling": pooling,
        }
        return self._pool(lambda: pair_scoring(self.spec, queries, documents, **options))

    def classify(
        self, prompts: PromptLike | list[PromptLike] | None, *, use_activation: bool | None = None
    ) -> list[ClassificationOutput] | None:
        """Compute the scores of a classifier's labels for every prompt. Collective, like ``generate``.

        Args:
            prompts: one prompt or a list of them, see ``PromptLike``.
            use_activation: False for the logits of the labels.

        Returns:
            Outputs in the order of the prompts on rank 0, None on the other ranks.

        Raises:
            UserError: a prompt is invalid, or the model has no score head; raised on rank 0 before anything has run.
        """
        return self._pool(lambda: Classification(model=self.spec, given=prompts, use_activation=use_activation))

    def _pool(self, make: Callable[[], PairScoring | Classification | PromptEmbedding]) -> list | None:
        """Run the prompts of the work that ``make`` returns on rank 0, and return its outputs."""
        made: list[PairScoring | Classification | PromptEmbedding] = []

        def requests() -> list[Request]:
            made.append(make())
            return self._make_requests(made[0].prompts(), None, pooling=made[0].pooled_by)

        pooled = self._gather(requests, lambda requests: self._runner.outputs(requests))
        return made[0].outputs(pooled) if made else None

    def make_request(self, key: Any, prompt: PromptLike, sampling: SamplingParams, **fields: Any) -> Request:
        """Make an engine request from a prompt: tokenize and check it. On rank 0 only.

        Args:
            fields: further fields of the ``Request``, such as ``cache_salt``, ``priority`` and ``user``; values in a dictionary
                prompt take precedence.

        Raises:
            UserError: the prompt or a parameter is invalid.
        """
        request = self.inputs.read(key, prompt, sampling, **fields)
        self.check_processors(request)
        self.engine.check_request(request)
        return request

    def check_processors(self, request: Request) -> None:
        """Check that the logits processors of a request exist and accept the values that it gives them.

        Raises:
            UserError: a logits processor does not exist, or rejects the value.
        """
        check_logits_processors(request.sampling.logits_processors, request.prompt_token_ids, self.spec.vocab_size)

    def run(
        self,
        requests: Iterable[Request | None],
        check: Callable[[], None] = lambda: None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Iterator[RequestOutput | EmbeddingOutput]:
        """Run requests on rank 0, and yield their outputs as they finish. The other ranks must call ``follow``.

        Args:
            requests: iterated over whenever the engine's queue has room; None means that no request is available yet.
            check: called in every step; may raise ``Interrupted``.
            on_delta: called with each ``Delta`` as it is generated.
        """
        self.check_usable()
        return self._call_lock.run(self._runner.outputs(requests, check, on_delta))

    def end_run(self) -> list[WorkerStats]:
        """End a run on all ranks; called on rank 0. Writes the trace if one was requested. Returns the statistics of each rank."""
        return self._runner.end()

    def follow(self) -> None:
        """Take part in rank 0's run until it ends; called on all other ranks."""
        self.check_usable()
        with self._call_lock.turn():
            follow_all([self])

    def close(self) -> None:
        """Leave the group of ranks in order, and free weights and KV cache. Collective. The LLM is unusable afterwards."""
        if not self._closed and LLM._fork_guard.is_here:
            self.unload()
            self.group.close(patient=self.is_spare)

    def unload(self) -> None:
        """Free weights and KV cache, but stay in the group of ranks. Collective. Afterwards the caller must call ``end_splits`` of
        the group."""
        with self._call_lock.turn():
            self._closed = True
            if self.is_rank0:
                self.inputs.close()
                self._runner.close()
                self._parts.channel.close()
            for parts in filter(None, (self._parts, self._draft_rank)):
                parts.close()

    def check_usable(self) -> None:
        """Check that this LLM can be used in this process.

        Raises:
            UserError: the LLM is closed, or this process was forked from the one that made it.
        """
        LLM._fork_guard.enter()
        if self._closed:
            raise UserError("this LLM is closed; make a new LLM")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:  # after a failure, the other ranks do not reach this collective call
            self.close()

    def _generate(
        self, prompts: Callable[[], Any], sampling_params: Any, on_delta: Callable[[Delta], None] | None
    ) -> list[RequestOutput] | None:
        return self._gather(
            lambda: self._make_requests(prompts(), sampling_params, streams=on_delta is not None),
            lambda requests: self._runner.outputs(requests, on_delta=on_delta),
        )

    def _make_requests(
        self, prompts: Any, sampling_params: Any, *, pooling: str = "", streams: bool = False
    ) -> list[Request]:
        """Make engine requests for prompts. The key of a request is the index of its prompt, which error messages name."""
        requests = []
        for index, (prompt, sampling) in enumerate(pair_prompts(prompts, sampling_params)):
            try:
                requests.append(self.make_request(index, prompt, sampling, pooling=pooling))
            except UserError as error:
                raise UserError(f"prompt {index}: {as_keywords(str(error))}") from None
            if streams:
                check_can_stream(requests[-1])
        return requests

    def _gather(self, make: Callable[[], list[Request]], run: Callable[[list[Request]], Iterator]) -> list | None:
        """Run the requests that ``make`` returns by ``run``, and return their outputs in the order of the requests;
        None on ranks other than 0."""
        self.check_usable()
        outputs = list(self._call_lock.run(self._call(make, run)))
        return sorted(outputs, key=lambda output: output.key) if self.is_rank0 else None

    def _call(self, make: Callable[[], list[Request]], run: Callable[[list[Request]], Iterator]) -> Iterator[Any]:
        """On rank 0, yield what ``run`` (outputs or deltas) yields for the requests of ``make``. On other ranks, take part in the
        run and yield nothing."""
        if not self.is_rank0:
            follow_all([self])
            return
        try:
            requests = make()
        except BaseException:
            self._executor.end_run([])  # the other ranks wait in ``follow_all`` for the next run
            raise
        yield from run(requests)


def follow_all(llms: list[LLM]) -> None:
    """Take part in rank 0's runs of all models until they end; called on all other ranks."""
    for llm in llms:
        if llm._draft_rank is not None:
            llm._draft_rank.follow(llm._drafter.answer)
    parts = [llm._parts for llm in llms if not llm.is_spare]
    if not parts:
        return
    for part in parts:
        part.stats.begin()
    follow(parts[0].channel, [(part.worker, part.stats, part.recorder) for part in parts])
