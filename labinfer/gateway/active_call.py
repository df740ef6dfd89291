"""ActiveCall: a call's requests to the engine: admitted, started, awaited, and freed whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from labinfer.engine.request import Request
from labinfer.errors import UserError
from labinfer.gateway.call import Call, refused_field
from labinfer.gateway.event_stream import EventStream
from labinfer.gateway.limits import RETRY_SECONDS, Lease, LimitReached, ServerFull
from labinfer.gateway.service import Model
from labinfer.gateway.submission import (
    BrokenOff,
    Cancelled,
    EngineFailed,
    EngineGone,
    QueueIsFull,
    Submission,
    TimeIsUp,
)
from labinfer.openai import api_errors
from labinfer.openai.answer import Usage, count_usage
from labinfer.openai.api_errors import ApiError
from labinfer.outputs import Delta, RequestOutput, RequestState
from labinfer.pooling import EmbeddingOutput
from labinfer.protocol import ChatBody, CompletionBody, EmbeddingBody, ParsedBody

FIELD_NAMES = {name for body in (ChatBody, CompletionBody, EmbeddingBody) for name in body.__struct_fields__} | {
    "tokens"
}
"""Fields of all bodies; ``tokens`` is that of ``/detokenize``."""

ENDINGS = (UserError, QueueIsFull, TimeIsUp, Cancelled, BrokenOff, EngineGone, EngineFailed)
"""Failures of a submission."""

Result = TypeVar("Result")


def checked(make: Callable[[], Result]) -> Result:
    """The result of ``make``; a ``UserError`` becomes the ``ApiError`` of a wrong request."""
    try:
        return make()
    except UserError as error:
        raise refused_field(error, FIELD_NAMES) from None


async def read_requests(call: Call, model: Model, parsed: ParsedBody) -> list[Request]:
    """The call's prompts as requests, with its caller's part of the KV cache; tokenized beside the event loop.

    Raises:
        ApiError: what is wrong with one of them.
    """
    sampling = parsed.sampling
    if parsed.stream and not sampling.can_stream:
        raise api_errors.bad_request("best_of and num_beams cannot stream: the best are known at the end", "stream")
    salt, user = call.caller.salt_for(parsed.cache_salt), call.caller.user_for(parsed.user)

    def read() -> list[Request]:
        return [
            model.reader.process(None, prompt, sampling, cache_salt=salt, priority=parsed.priority, user=user)
            for prompt in parsed.prompts
        ]

    requests = await asyncio.to_thread(checked, read)
    guided = [request for request in requests if request.sampling.structured_outputs is not None]

    def check() -> None:
        for request in guided:
            model.reader.check_form(request)

    if guided:
        await asyncio.get_running_loop().run_in_executor(call.service.trials, checked, check)
    return requests


class ActiveCall:
    """The requests of a call, with the engine."""

    def __init__(self, call: Call, model: Model, submission: Submission):
        self._call, self._model, self._submission = call, model, submission
        self._lease: Lease | None = None  # until it is admitted, and when it is over
        self._token_times: dict[tuple[int, int], float] = {}
        self._spent = 0
        self._status = 200  # for the log: that of a stream that fails has been sent before

    @classmethod
    async def start(
        cls, call: Call, model: Model, requests: list[Request], streams: bool, user: str | None
    ) -> ActiveCall:
        """Returns when it was their turn, and the engine has taken them.

        Raises:
            ApiError: a limit is reached, or the engine refuses one of them.
        """
        service = call.service
        _check_lengths(requests, model.info.max_model_len)
        call.facts |= {"model": model.info.name, "prompt_tokens": sum(len(r.prompt_token_ids) for r in requests)}
        submission = service.engine.submission(
            requests,
            model.reader.tokenizer,
            id=call.id,
            model=model.info.name,
            owner=call.caller.name,
            seconds=service.options.request_timeout,
            streams=streams,
        )
        active, is_started = cls(call, model, submission), False
        try:
            turn = service.limits.admit(call.caller, user, call.facts["prompt_tokens"])
            active._lease = await active._until_disconnect(submission.after(turn))
            await active._until_disconnect(submission.start())
            is_started = True
        except ApiError:
            if active._lease is not None:  # what nobody has run costs nothing
                active._lease.spend(-call.facts["prompt_tokens"])
            raise
        except LimitReached as error:
            raise api_errors.rate_limited(error.message, error.retry_after_seconds, error.kind) from None
        except ServerFull as error:
            raise api_errors.overloaded(error.message, error.retry_after_seconds) from None
        finally:
            if not is_started:
                active.close()
        return active

    async def outputs(self) -> list[RequestOutput] | list[EmbeddingOutput]:
        """All answers, or vectors.

        Raises:
            ApiError: they will not come.
        """
        try:
            return await self._until_disconnect(self._submission.outputs())
        finally:
            self.close()

    def stream(self, events: AsyncIterator[bytes]) -> EventStream:
        """The response that sends these events, which are made of ``deltas``."""

        def end() -> None:
            self.close()
            self._call.end(self._status)

        return EventStream(events, self._call.headers, self.give_up, end, self._call.service.clock)

    def usage(self) -> Usage:
        """Tokens of all requests so far."""
        return count_usage(
            sum(len(opened.request.prompt_token_ids) for opened in self.opened),
            sum(opened.num_output_tokens for opened in self.opened),
            sum(opened.num_cached_tokens for opened in self.opened),
        )

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Deltas of the answers as they come; ``close`` afterwards.

        Raises:
            ApiError: the rest will not come.
        """
        try:
            async for number, delta in self._submission.deltas():
                self._note(number, delta)
                yield number, delta
        except ENDINGS as error:
            translated = self._translate(error)
            self._status = translated.status
            raise translated from None

    @property
    def opened(self) -> list[RequestState]:
        """The state of each request."""
        return self._submission.opened

    def give_up(self) -> None:
        """The client is gone."""
        self._submission.fail(Cancelled("the client has closed the connection"))

    def close(self) -> None:
        """Free everything, count and note what came of it. A second call does nothing."""
        self._submission.close()
        lease, self._lease = self._lease, None
        if lease is not None:
            with lease:
                self._count(lease)

    async def _until_disconnect(self, work: Awaitable[Result]) -> Result:
        try:
            return await self._call.until_disconnect(work, self.give_up)
        except ENDINGS as error:
            raise self._translate(error) from None

    def _translate(self, error: Exception) -> ApiError:
        if isinstance(error, UserError):
            return refused_field(error, FIELD_NAMES)
        if isinstance(error, QueueIsFull):
            return api_errors.overloaded(str(error), RETRY_SECONDS)
        if isinstance(error, TimeIsUp):
            return api_errors.timed_out(self._call.service.options.request_timeout)
        if isinstance(error, BrokenOff):
            return api_errors.bad_request(str(error), "structured_outputs")
        if isinstance(error, Cancelled):
            return api_errors.cancelled(str(error))
        if isinstance(error, EngineFailed):
            return api_errors.engine_failed(str(error))
        return api_errors.draining(RETRY_SECONDS)

    def _note(self, number: int, delta: Delta) -> None:
        """The times of tokens, for the metrics."""
        if not delta.token_ids:
            return
        self._lease.spend(len(delta.token_ids))
        self._spent += len(delta.token_ids)
        now, key = self._call.service.clock(), (number, delta.index)
        last = self._token_times.get(key)
        if last is not None:
            self._call.service.metrics.inter_token(self._model.info.name, (now - last) / len(delta.token_ids))
        self._token_times[key] = now

    def _count(self, lease: Lease) -> None:
        call, opened = self._call, self._submission.opened
        name, metrics, now = self._model.info.name, call.service.metrics, call.service.clock()
        generated = sum(request.num_output_tokens for request in opened)
        lease.spend(generated - self._spent)
        call.facts |= {
            "cached_tokens": sum(request.num_cached_tokens for request in opened),
            "generated_tokens": generated,
        }
        reasons = []
        for request in opened:
            for answer in request.answers:
                first = answer.first_token_time - call.begin if answer.first_token_time else None
                reasons.append(answer.finish_reason.value if answer.finish_reason else "abort")
                if first is not None:
                    metrics.first_token(name, first)
                    call.facts.setdefault("ttft_seconds", first)
                end = answer.end_time or now
                metrics.finished(
                    name,
                    reasons[-1],
                    prompt_tokens=len(request.request.prompt_token_ids),
                    generated=len(answer.token_ids),
                    e2e_seconds=end - call.begin,
                    queue_seconds=answer.queue_seconds,
                    first_token_seconds=first,
                )
        call.facts["finish_reason"] = ",".join(dict.fromkeys(reasons))


def _check_lengths(requests: list[Request], longest: int) -> None:
    """Refuse what is far too long, which is not to burden the engine. That says itself what just does not fit.

    Raises:
        ApiError: a prompt is longer than the context.
    """
    for request in requests:
        if len(request.prompt_token_ids) > longest:
            raise api_errors.bad_request(
                f"the prompt has {len(request.prompt_token_ids)} tokens, but at most {longest} fit in the context; "
                "shorten it"
            )
