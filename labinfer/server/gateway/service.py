"""Service: the state that all routes share: models, API keys, limits, stores and metrics."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import MAX_SEED, SamplingParams
from labinfer.base.standard_error import StandardError
from labinfer.observe.line_writer import LineWriter
from labinfer.requests.input_processor import InputProcessor
from labinfer.requests.openai import api_errors
from labinfer.server.gateway.access import ApiKeys
from labinfer.server.gateway.admission_control import LOADING_SECONDS, RETRY_SECONDS, AdmissionControl
from labinfer.server.gateway.async_llm_engine import AsyncLLMEngine
from labinfer.server.gateway.body_memory import BodyMemory
from labinfer.server.gateway.cluster_history import ClusterHistory
from labinfer.server.gateway.file_store import FileStore
from labinfer.server.gateway.metrics import Metrics
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.otel import RequestEnd, RequestTracer
from labinfer.server.gateway.recent_requests import RecentRequests
from labinfer.server.gateway.request_builder import RequestBuilder
from labinfer.server.gateway.request_log import RequestLog
from labinfer.server.gateway.stored_responses import StoredResponses
from labinfer.server.link.frames import ModelInfo
from labinfer.server.link.stats import EngineStats

COMPLETION_TOKENS = 16
"""Default ``max_tokens`` of completions, as in OpenAI's API. Chat answers may fill the context by default."""
LONGEST = 1 << 17
"""Upper end, in tokens, of the histograms of prompt and output lengths in ``/metrics``."""


@dataclass(frozen=True)
class Model:
    """A served model: its description, and the objects that make engine requests of bodies."""

    info: ModelInfo
    reader: InputProcessor
    builder: RequestBuilder

    @classmethod
    def load(cls, info: ModelInfo, options: ServerOptions) -> Model:
        """Load the tokenizer of a model, which must be the one that rank 0 has loaded.

        Raises:
            UserError: the tokenizer cannot be read, or its files differ from those that rank 0 read.
        """
        reader = InputProcessor(
            Path(info.tokenizer), info.needs_tokenizer, info.response_template, info.max_model_len, info.chat_template
        )
        if reader.tokenizer_digest != info.tokenizer_digest:
            raise UserError(f"the tokenizer in {info.tokenizer} has changed since rank 0 loaded it; restart")
        return cls(info, reader, RequestBuilder(reader, options, info.max_model_len))

    def shares_tokenizer(self, info: ModelInfo) -> bool:
        """Whether ``info``, sent by a new engine host, has this model's tokenizer, templates and maximum context length. If so, the
        tokenizer need not be loaded again."""
        names = (
            "tokenizer",
            "tokenizer_digest",
            "needs_tokenizer",
            "response_template",
            "chat_template",
            "max_model_len",
        )
        return all(getattr(self.info, name) == getattr(info, name) for name in names)

    def with_info(self, info: ModelInfo) -> Model:
        """Copy of this model for a new engine host, which describes it by ``info``."""
        return replace(self, info=info)

    def chat_defaults(self) -> SamplingParams:
        """Default sampling parameters of a chat request; the answer may fill the context."""
        return self._defaults(self.info.max_model_len)

    def completion_defaults(self) -> SamplingParams:
        """Default sampling parameters of a (text) completion request."""
        return self._defaults(COMPLETION_TOKENS)

    def _defaults(self, max_tokens: int) -> SamplingParams:
        sampling = {
            "temperature": 1.0
        } | self.info.recommended  # OpenAI's default, unless the checkpoint recommends a value
        return SamplingParams(max_tokens=max_tokens, seed=secrets.randbelow(MAX_SEED), **sampling)


class Service:
    """State of a gateway, which every route receives.

    Args:
        model_names: names of the models to serve; the first is the default.
        clock: monotonic time in seconds.
        wall_clock: seconds since 1970.
        log: stream of the request log; standard error by default.

    Raises:
        UserError: the key file, the folder of files or the OpenTelemetry library cannot be used.
    """

    def __init__(
        self,
        options: ServerOptions,
        model_names: list[str],
        engine: AsyncLLMEngine,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        log: TextIO | LineWriter | None = None,
    ):
        self.options, self.model_names, self.engine = options, model_names, engine
        self.clock, self.wall_clock = clock, wall_clock
        self.files = FileStore(options, wall_clock) if options.files_dir else None
        secret = self.files.secret if self.files else b""
        self.keys = ApiKeys.load(options.api_key, options.api_key_file, options.is_local, secret)
        self.admission = AdmissionControl(options, clock)
        self.body_memory = BodyMemory(options)
        self.body_thread = ThreadPoolExecutor(1, "long bodies")
        """Thread that decodes and validates long bodies; ``body_memory`` bounds its queue."""
        self.stored_responses = StoredResponses(options)
        self.metrics = Metrics(model_names, LONGEST, clock)
        self.history = ClusterHistory(model_names, engine.watch, self._count_open, self.metrics.recent, wall_clock)
        self.recent_requests = RecentRequests(model_names)
        engine.on_stats, engine.on_trace = self._add_stats, self.history.add_trace
        engine.on_begin, engine.on_attach, engine.on_end = self.history.begin, self._attach, self._end
        self.on_request_end: Callable[[RequestEnd], None] = lambda end: None
        """Function that is called with each engine request that has ended; by default it does nothing."""
        self._tracer: RequestTracer | None = None
        if options.otlp_traces_endpoint:
            self._tracer = RequestTracer(options.otlp_traces_endpoint, clock, wall_clock)
            self.on_request_end = self._tracer.record
        self.log = RequestLog(log or StandardError(), options.log_json, wall_clock)
        self.models: dict[str, Model] = {}
        self._num_hosts = 0  # number of engine hosts that have ended so far
        self._attached: asyncio.Queue[tuple[int, list[ModelInfo]]] = asyncio.Queue()
        self.started = int(wall_clock())

    def close(self) -> None:
        """Export the queued OpenTelemetry spans at the end of the gateway. Blocks for up to ``otel.CLOSE_SECONDS``."""
        if self._tracer is not None:
            self._tracer.close()

    def _add_stats(self, stats: EngineStats) -> None:
        self.metrics.update_engine(stats)
        self.history.add_stats(stats)

    def _count_open(self, model: str) -> tuple[int, int]:
        """Numbers of running and of waiting requests of ``model``."""
        running = len(self.engine.running_tasks(model))
        return running, len(self.engine.tasks(model)) - running

    def _attach(self, models: list[ModelInfo]) -> None:
        self.history.attach(models)
        if any(model.changed for model in models):  # the tokenizer of the previous model must not read prompts any more
            self._close_models()
        self._attached.put_nowait((self._num_hosts, models))

    def _end(self, is_final: bool) -> None:
        """Handle the end of an engine host. Drop the models' tokenizers if ``is_final``; otherwise keep them for the
        next host, which resumes the open requests."""
        if is_final:
            self._close_models()
        self._num_hosts += 1
        self.history.end()

    def _close_models(self) -> None:
        for model in self.models.values():
            model.reader.close()
        self.models = {}

    async def prepare_models(self) -> None:
        """Whenever an engine host has loaded its models, load the tokenizers of these models in this process. Never returns.

        Raises:
            UserError: a tokenizer cannot be read.
        """
        while True:
            number, models = await self._attached.get()
            loaded = [
                before.with_info(info)
                if (before := self.models.get(info.name)) is not None and before.shares_tokenizer(info)
                else await asyncio.to_thread(Model.load, info, self.options)
                for info in models
            ]
            if number == self._num_hosts:  # the host that sent these models is still the current one
                self.models = {model.info.name: model for model in loaded}
                self.engine.notify_ready()

    def model(self, name: str | None) -> Model:
        """Return the model called ``name`` (the default model for None) for a new request.

        Raises:
            ApiError: there is no such model, the models are not loaded, or the server is shutting down.
        """
        model = self.loaded_model(name)
        if self.engine.is_draining:
            raise api_errors.draining(self.options.drain_timeout)
        return model

    def check_room(self) -> None:
        """Check that the server has capacity for any new request, even a request with a long prompt or a new grammar.

        Raises:
            ApiError: a limit is reached: of open requests, body memory or a queue.
        """
        if self.admission.is_full:
            message = f"{self.admission.num_open} requests are open (limit: --max-open-requests)"
        elif self.body_memory.is_full:
            message = "the memory for request bodies is full (--max-body-memory)"
        elif any(model.builder.is_full for model in self.models.values()):
            message = "the queue of long prompts or new structured-output schemas is full (--max-preparing-per-caller)"
        else:
            return
        raise api_errors.overloaded(f"the server is saturated: {message}; try again in a moment", RETRY_SECONDS)

    def loaded_model(self, name: str | None) -> Model:
        """Return the model called ``name`` to a route that only inspects it, also while the server is shutting down.

        Raises:
            ApiError: there is no such model, or it is not loaded yet.
        """
        if name is not None and name not in self.model_names:
            raise api_errors.not_found_model(name)
        if not self.models and self.engine.is_draining:
            raise api_errors.draining(self.options.drain_timeout)
        if not self.models:
            raise api_errors.overloaded("the models are being loaded; try again in a moment", LOADING_SECONDS)
        return self.models[name or self.model_names[0]]
