"""GenerationTask: the engine requests of one HTTP request, from admission until their resources are released."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from labinfer.base.errors import UserError
from labinfer.base.pooling import EmbeddingOutput
from labinfer.engine.request import AnswerUpdate, FinishReason, Request
from labinfer.requests.generation_input import GenerationInput
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError
from labinfer.requests.openai.api_object import Usage, total_usage
from labinfer.requests.outputs import CompletionState, Delta, RequestOutput, RequestState
from labinfer.requests.prompts import ChatPrompt
from labinfer.server.gateway.admission_control import RETRY_SECONDS, Lease
from labinfer.server.gateway.event_stream import OPENAI_FORM, EventStream, StreamForm
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.metrics import COMPLETE
from labinfer.server.gateway.otel import RequestEnd
from labinfer.server.gateway.recent_requests import RequestSize
from labinfer.server.gateway.refusals import checked, refused_field
from labinfer.server.gateway.service import Model
from labinfer.text.reply_reader import ReplyReader
from labinfer.text.tokenizing import PromptText

Result = TypeVar("Result")


class GenerationTask:
    """The engine requests of one HTTP request, from admission to the end of their answers.

    A task fails on a timeout, an engine failure, a cancellation or a client disconnect. When it fails, its resources are freed, and
    coroutines that await it raise an ``ApiError``.

    Args:
        input: the parsed request body.
    """

    def __init__(self, context: HttpContext, model: Model, input: GenerationInput):
        self.model, self.input = model, input
        self._context, self._engine = context, context.service.engine
        self.id, self.owner, self.model_name = context.id, context.caller.name, model.info.name
        self.user = input.user or ""
        self.names = {context.id}
        """Ids by which the owner may cancel the task: the id of the HTTP request, and that of the answer if it differs."""
        loop = asyncio.get_running_loop()
        self.begin = loop.time()
        """Start time of the task, by the event loop's clock."""
        self.opened: list[RequestState] = []
        """State of each engine request of the task; empty until the engine requests are built."""
        self._timer: asyncio.TimerHandle | None = None
        if context.seconds:
            self._timer = loop.call_later(context.seconds, self.fail, api_errors.timed_out(context.seconds))
        self._news = asyncio.Event()
        self._changed: dict[tuple[int, int], None] = {}  # (request, answer) with unread updates, in arrival order
        self._num_accepted = 0
        self._error: ApiError | None = None
        self._lease: Lease | None = None  # the lease, from admission to ``close``
        self._token_times: dict[tuple[int, int], float] = {}
        self._with_first_token: set[tuple[int, int]] = set()  # (request, answer) numbers whose TTFT is recorded
        self._spent = 0
        self._status = 200  # for the log: a stream that fails has already sent HTTP status 200

    @classmethod
    async def start(cls, context: HttpContext, model: Model, parse: Callable[[], GenerationInput]) -> GenerationTask:
        """Create and start a task. Returns once the task is admitted and the engine has accepted its requests. All costly work is
        done after admission, and its time counts towards the request's timeout.

        Raises:
            ApiError: ``parse`` raises a ``UserError``, a prompt is invalid, the engine refuses an engine request, or a limit is
                reached.
        """

        def read() -> tuple[GenerationInput, list[PromptText] | None]:
            input = checked(parse)
            if input.stream and not input.sampling.can_stream:
                raise api_errors.bad_request(
                    "best_of and num_beams cannot stream, as the best outputs are known only at the end", "stream"
                )
            for text in input.warnings:
                context.warn(text)
            return input, model.builder.read_texts(input, context.num_body_bytes)

        input, texts = await context.compute(read)
        if context.service.model(model.info.name).reader is not model.reader:
            raise api_errors.overloaded(
                "the model's files changed while the request was read; send the request again", RETRY_SECONDS
            )
        context.log_fields["model"] = model.info.name
        task, is_started = cls(context, model, input), False
        task._engine.register(task)
        try:
            requests = await context.until_disconnect(task._after(task._prepare(texts)), task.give_up)
            context.log_fields["prompt_tokens"] = num_tokens = sum(
                len(request.prompt_token_ids) for request in requests
            )
            tokenizer = model.reader.tokenizer
            task.opened = [task._engine.open(request, tokenizer, input.stream, context.id) for request in requests]
            task._lease.charge_prompt(num_tokens)
            try:
                await context.until_disconnect(task._hand_over(), task.give_up)
            except ApiError:
                task._lease.spend(-num_tokens)  # refund the charge: the prompt was not run
                raise
            is_started = True
        finally:
            if not is_started:
                task.close()
        return task

    async def outputs(self) -> list[RequestOutput] | list[EmbeddingOutput]:
        """Wait for all answers or embeddings, and return them.

        Raises:
            ApiError: the task has failed.
        """
        try:
            await self._context.until_disconnect(self._finish(), self.give_up)
            return [opened.output() for opened in self.opened]
        finally:
            self.close()

    def stream(self, events: AsyncIterator[bytes], form: StreamForm = OPENAI_FORM) -> EventStream:
        """Return the HTTP response that streams ``events``, which the caller makes from ``deltas``."""

        def end() -> None:
            self.close()
            self._context.end(self._status)

        return EventStream(events, self._context.headers, self.give_up, end, self._context.service.clock, form=form)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield each delta when it arrives, as (number of the engine request, delta). The caller must ``close`` the task
        afterwards.

        Raises:
            ApiError: the task has failed.
        """
        while not self.is_done or self._changed:
            if not self._changed:
                try:
                    await self._wait()
                except ApiError as error:
                    if not self._changed:  # the error comes after output that arrived with it
                        self._status = error.status
                        raise
            if self._changed:  # one delta at a time: updates that arrive while it is sent are merged into the next one
                number, index = next(iter(self._changed))
                del self._changed[number, index]
                delta = self.opened[number].take_delta(index, drops_logprobs=True)
                self._note(number, delta)
                yield number, delta

    def usage(self, readers: list[ReplyReader] | None = None) -> Usage:
        """Token counts of all engine requests so far. Includes reasoning tokens if ``readers`` has the reply reader of each answer
        (only for a task with one engine request)."""
        if readers is None:
            return total_usage(self.opened)
        (state,) = self.opened
        answers = zip(readers, state.answers, strict=True)
        return total_usage(
            self.opened, sum(reader.num_reasoning_tokens(answer.token_ids) for reader, answer in answers)
        )

    @property
    def is_done(self) -> bool:
        """Whether all engine requests of the task are complete."""
        return bool(self.opened) and all(opened.is_done for opened in self.opened)

    def give_up(self) -> None:
        """Fail the task because the client has disconnected."""
        self.fail(api_errors.cancelled("the client closed the connection"))

    def fail(self, error: ApiError) -> None:
        """Fail the task with ``error``: free its resources, and make coroutines that await the task raise the error."""
        if not self.is_done:
            self._error = self._error or error
            self._news.set()
        self._engine.forget(self)

    def close(self) -> None:
        """Abort unfinished requests, free all resources, and record metrics and log fields. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._engine.forget(self)
        lease, self._lease = self._lease, None
        if lease is not None:
            with lease:
                if self.opened:
                    self._count(lease)

    # Callbacks of the engine client.

    def accept(self) -> None:
        """Count one more engine request of the task that the engine has accepted."""
        self._num_accepted += 1
        self._news.set()

    def update(self, number: int, update: AnswerUpdate) -> bool:
        """Apply an engine update to an answer of request ``number``. Returns whether the engine must abort the answer because the
        text of the answer contains a stop string; the engine itself does not look for stop strings."""
        opened = self.opened[number]
        if opened.answers[update.index].finish_reason is not None:  # a stop string has ended the answer already
            return False
        if update.finish_reason is FinishReason.ABORT:
            reason = update.error or "the engine could not continue"
            self.fail(refused_field(UserError(f"{reason}; the output was aborted")))
            return False
        stopped = opened.add(update)
        self._note_first_token(number, opened.answers[update.index])
        self._changed[number, update.index] = None
        self._news.set()
        return stopped and update.finish_reason is None

    # Parts of ``start``.

    async def _after(self, work: Awaitable[Result]) -> Result:
        """Await ``work`` and return its result. If the task fails first, cancel ``work`` and raise the error of the task."""
        task, failing = asyncio.ensure_future(work), asyncio.ensure_future(self._wait())
        try:
            await asyncio.wait((task, failing), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await failing
            return await task  # also if the task has failed by now: ``_hand_over`` raises later
        finally:
            task.cancel()
            failing.cancel()
            await asyncio.gather(failing, return_exceptions=True)

    async def _prepare(self, texts: list[PromptText] | None) -> list[Request]:
        """Wait for admission, then build the engine requests; ``texts`` is the result of ``RequestBuilder.read_texts``."""
        context, builder, input = self._context, self.model.builder, self.input
        self._lease = await context.service.admission.admit(context.caller, input.user, 0)
        own = replace(
            input,
            user=context.caller.user_for(input.user),
            cache_salt=context.caller.salt_for(input.cache_salt),
            priority=input.priority + context.priority,
        )
        requests, untried = await builder.build(own, texts, context.queue_name, context.num_body_bytes)
        context.free_body()
        for request in untried:
            await builder.try_grammar(context.queue_name, request)
        return requests

    async def _hand_over(self) -> None:
        """Submit the engine requests, and wait until the engine has accepted all of them.

        Raises:
            ApiError: the task failed before it had output.
        """
        if self._error is None:
            self._engine.start(self)
        while self._num_accepted < len(self.opened):
            try:
                await self._wait()
            except ApiError:
                if not self._changed or self._num_accepted < len(self.opened):
                    raise  # output that is not read yet comes first: ``deltas`` or ``outputs`` raise after it

    async def _finish(self) -> None:
        while not self.is_done:
            await self._wait()

    async def _wait(self) -> None:
        if self._error is None:
            await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error.with_traceback(None)  # one error object ends many tasks

    # Metrics and log.

    def _note(self, number: int, delta: Delta) -> None:
        """Charge the caller for the tokens of ``delta``, and record its inter-token latency."""
        if not delta.token_ids:
            return
        self._lease.spend(len(delta.token_ids))
        self._spent += len(delta.token_ids)
        now, key = self._context.service.clock(), (number, delta.index)
        last = self._token_times.get(key)
        if last is not None:
            self._context.service.metrics.inter_token(self.model_name, (now - last) / len(delta.token_ids))
        self._token_times[key] = now

    def _note_first_token(self, number: int, answer: CompletionState) -> None:
        """Record the TTFT of an answer, unless it has no token yet or the TTFT is recorded."""
        if answer.first_token_time and (number, answer.index) not in self._with_first_token:
            self._with_first_token.add((number, answer.index))
            seconds = answer.first_token_time - self._context.begin
            self._context.service.metrics.first_token(self.model_name, seconds, answer.queue_seconds)

    def _count(self, lease: Lease) -> None:
        context, metrics, now = self._context, self._context.service.metrics, self._context.service.clock()
        generated = sum(request.num_output_tokens for request in self.opened)
        lease.spend(generated - self._spent)
        context.log_fields |= {
            "cached_tokens": sum(request.num_cached_tokens for request in self.opened),
            "generated_tokens": generated,
        }
        reasons = []
        for number, request in enumerate(self.opened):
            for answer in request.answers:
                self._note_first_token(number, answer)  # only the first beam has had updates
                first = answer.first_token_time - context.begin if answer.first_token_time else None
                reasons.append(answer.finish_reason.value if answer.finish_reason else "abort")
                if first is not None:
                    context.log_fields.setdefault("ttft_seconds", first)
                end = answer.end_time or now
                metrics.finished(
                    self.model_name,
                    reasons[-1],
                    prompt_tokens=len(request.prompt_token_ids),
                    generated=len(answer.token_ids),
                    e2e_seconds=end - context.begin,
                    queue_seconds=answer.queue_seconds,
                    first_token_seconds=first,
                )
                self._keep(request, answer, reasons[-1])
        self._observe(now)
        context.log_fields["finish_reason"] = ",".join(dict.fromkeys(reasons))

    def _observe(self, now: float) -> None:
        """Pass each engine request to ``Service.on_request_end``. ``now`` counts as end time of requests that are incomplete."""
        context = self._context
        for number, state in enumerate(self.opened):
            error = (self._error.code or self._error.type) if self._error else None
            end = RequestEnd(
                id=f"{context.id}-{number}" if len(self.opened) > 1 else context.id,
                model=self.model_name,
                headers=context.http.headers,
                state=state,
                begin=context.begin,
                end=max(answer.end_time for answer in state.answers) if state.is_done else now,
                error=None if state.is_done else error or "cancelled",
            )
            context.service.on_request_end(end)

    def _keep(self, request: RequestState, answer: CompletionState, reason: str) -> None:
        """Record the lengths of a complete answer in ``RecentRequests``. If a request has several answers, the prompt counts as a
        prefix-cache hit for all but the first."""
        prompt, service = len(request.prompt_token_ids), self._context.service
        if reason not in COMPLETE or not answer.token_ids:
            return
        size = RequestSize(
            timestamp=round((service.wall_clock() - service.clock() + self._context.begin) * 1000),
            prompt_tokens=prompt,
            cached_tokens=prompt - 1 if answer.index else request.num_cached_tokens,
            output_tokens=len(answer.token_ids),
        )
        service.recent_requests.add(self.model_name, size)


async def count_prompt_tokens(context: HttpContext, model: Model, parse: Callable[[], ChatPrompt]) -> int:
    """Number of prompt tokens of a chat body, including those that the chat template adds.

    Raises:
        ApiError: ``parse`` raises a ``UserError``, the conversation cannot be tokenized, or too many long prompts are queued.
    """
    text = await context.compute(lambda: checked(lambda: model.reader.prompt_text(parse())))
    (token_ids,) = await model.builder.encode(context.queue_name, [text], context.num_body_bytes)
    return len(token_ids)
