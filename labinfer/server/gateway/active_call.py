"""ActiveCall: a call's requests to the engine: admitted, started, awaited, and freed whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator

from labinfer.base.pooling import EmbeddingOutput
from labinfer.engine.request import Request
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.answer import Usage, count_usage
from labinfer.requests.openai.api_errors import ApiError
from labinfer.requests.outputs import Answer, Delta, RequestOutput, RequestState
from labinfer.server.gateway.call import Call
from labinfer.server.gateway.call_requests import CallRequests
from labinfer.server.gateway.event_stream import OPENAI_FORM, EventStream, StreamForm
from labinfer.server.gateway.limits import RETRY_SECONDS, Lease
from labinfer.server.gateway.metrics import COMPLETE
from labinfer.server.gateway.recent_requests import RequestSize
from labinfer.server.gateway.service import Model
from labinfer.server.gateway.submission import Submission


class ActiveCall:
    """The requests of a call, with the engine."""

    def __init__(self, call: Call, model: Model, submission: Submission):
        self._call, self._model, self._submission = call, model, submission
        self._lease: Lease | None = None  # until it is admitted, and when it is over
        self._token_times: dict[tuple[int, int], float] = {}
        self._spent = 0
        self._status = 200  # for the log: that of a stream that fails has been sent before

    @classmethod
    async def start(cls, call: Call, model: Model, maker: CallRequests, streams: bool, user: str | None) -> ActiveCall:
        """Returns when it was their turn, and the engine has taken them. Nothing costly is done before its turn has come,
        and all of it counts as the call's time.

        Raises:
            ApiError: a prompt is wrong, or the engine refuses one of the requests.
            ApiError: there are too many.
        """
        service = call.service
        if service.model(model.info.name).reader is not model.reader:
            raise api_errors.overloaded(
                "the model's files were replaced while the body was read; send the request again", RETRY_SECONDS
            )
        call.facts["model"] = model.info.name
        submission = service.engine.submission(
            id=call.id, model=model.info.name, owner=call.caller.name, seconds=call.seconds
        )
        active, is_started = cls(call, model, submission), False
        try:
            requests = await call.until_disconnect(submission.after(active._prepare(maker, user)), active.give_up)
            call.facts["prompt_tokens"] = num_tokens = sum(len(request.prompt_token_ids) for request in requests)
            submission.open(requests, model.reader.tokenizer, streams)
            active._lease.charge_prompt(num_tokens)
            try:
                await call.until_disconnect(submission.start(), active.give_up)
            except ApiError:
                active._lease.spend(-num_tokens)  # what nobody has run costs nothing
                raise
            is_started = True
        finally:
            if not is_started:
                active.close()
        return active

    async def _prepare(self, maker: CallRequests, user: str | None) -> list[Request]:
        """The requests, made when it is the call's turn."""
        self._lease = await self._call.service.limits.admit(self._call.caller, user, 0)
        return await maker.make()

    async def outputs(self) -> list[RequestOutput] | list[EmbeddingOutput]:
        """All answers, or vectors.

        Raises:
            ApiError: they will not come.
        """
        try:
            return await self._call.until_disconnect(self._submission.outputs(), self.give_up)
        finally:
            self.close()

    def stream(self, events: AsyncIterator[bytes], form: StreamForm = OPENAI_FORM) -> EventStream:
        """The response that sends these events, which are made of ``deltas``."""

        def end() -> None:
            self.close()
            self._call.end(self._status)

        return EventStream(events, self._call.headers, self.give_up, end, self._call.service.clock, form=form)

    def usage(self, reasoning: int | None = None) -> Usage:
        """Tokens of all requests so far; ``reasoning`` of them are thoughts, None where those are not told apart."""
        return count_usage(
            sum(len(opened.request.prompt_token_ids) for opened in self.opened),
            sum(opened.num_output_tokens for opened in self.opened),
            sum(opened.num_cached_tokens for opened in self.opened),
            reasoning,
            drafted=sum(opened.num_drafted_tokens for opened in self.opened),
            accepted=sum(opened.num_accepted_tokens for opened in self.opened),
            steps=sum(opened.num_steps for opened in self.opened),
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
        except ApiError as error:
            self._status = error.status
            raise

    @property
    def opened(self) -> list[RequestState]:
        """The state of each request."""
        return self._submission.opened

    def add_name(self, name: str) -> None:
        """Let its owner cancel it by this name, too."""
        self._submission.names.add(name)

    def give_up(self) -> None:
        """The client is gone."""
        self._submission.fail(api_errors.cancelled("the client has closed the connection"))

    def close(self) -> None:
        """Free everything, count and note what came of it. A second call does nothing."""
        self._submission.close()
        lease, self._lease = self._lease, None
        if lease is not None:
            with lease:
                if self.opened:
                    self._count(lease)

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
                self._keep(request, answer, reasons[-1])
        call.facts["finish_reason"] = ",".join(dict.fromkeys(reasons))

    def _keep(self, request: RequestState, answer: Answer, reason: str) -> None:
        """Keep the size of an answer that ran to its end. The further ones of a request found its prompt in the cache."""
        prompt, service = len(request.request.prompt_token_ids), self._call.service
        if reason not in COMPLETE or not answer.token_ids:
            return
        size = RequestSize(
            timestamp=round((service.wall_clock() - service.clock() + self._call.begin) * 1000),
            prompt_tokens=prompt,
            cached_tokens=prompt - 1 if answer.index else request.num_cached_tokens,
            output_tokens=len(answer.token_ids),
        )
        service.recent_requests.add(self._model.info.name, size)
