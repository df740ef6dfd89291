"""RequestState: turns the engine's updates into the deltas and the output of a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from labinfer.base.plan import TokenLogprobs
from labinfer.base.pooling import EmbeddingOutput
from labinfer.engine.request import AnswerUpdate, FinishedBeam, FinishReason, Request
from labinfer.text.detokenizer import Detokenizer
from labinfer.text.token_decoder import TokenDecoder
from labinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Delta:
    """New text and tokens of an answer, after those of its previous delta. The texts of all deltas of an answer, joined, are its
    whole text."""

    key: Any
    index: int
    """Index of the answer in the request."""
    text: str | None
    """New text after the previous delta; None without a tokenizer. Does not end in a partial character or in the beginning of a
    stop string."""
    token_ids: list[int]
    finish_reason: str | None
    """Reason why the answer has ended; None in all deltas but the last."""
    logprobs: list[TokenLogprobs] | None = None
    """Logprobs of ``token_ids``, if requested."""
    stop_reason: str | int | None = None
    """Stop string or stop token id that ended the answer; see ``Completion``."""
    drafted: list[bool] = field(default_factory=list)
    """Whether each of ``token_ids`` is an accepted draft token."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer of a request: complete, or the part that has been generated so far."""

    index: int
    text: str | None
    """Generated text; None without a tokenizer."""
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    """Stop string or stop token id that ended the answer; None if none did."""
    logprobs: list[TokenLogprobs] | None
    """Logprobs of each token of the answer, if requested."""
    score: float | None = None
    """Beam search score; see ``SamplingParams.length_penalty``."""
    drafted: list[bool] = field(default_factory=list)
    """Whether each token of the answer is an accepted draft token; see ``--speculative-config``."""
    error: str = ""
    """Reason why the engine aborted the answer, if ``finish_reason`` is "abort"."""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """Output of a finished request. Times are in seconds."""

    key: Any
    prompt: str | None = None
    """Text of the prompt; for a conversation, the text that the chat template made. None if the prompt was given as
    token ids."""
    prompt_token_ids: list[int]
    completions: list[Completion]
    """The ``n`` answers; with ``best_of`` and beam search, the best answer comes first."""
    prompt_logprobs: list[TokenLogprobs] | None
    """Logprobs of each prompt token except the first, if requested."""
    num_cached_tokens: int
    """Prompt tokens that were prefix-cache hits when the first answer began."""
    num_output_tokens: int
    """Output tokens of all answers, including answers that ``best_of`` discards."""
    time_to_first_token: float
    time_per_output_token: float
    """Time per output token after the first (TPOT) of the slowest answer, in seconds; 0 for an answer of one token."""
    total_time: float
    num_drafted_tokens: int = 0
    """Number of drafted tokens of all answers; see ``--speculative-config``."""
    num_accepted_tokens: int = 0
    """Number of accepted draft tokens of all answers."""
    num_steps: int = 0
    """Number of engine steps that produced tokens of an answer, summed over all answers."""

    @property
    def outputs(self) -> list[Completion]:
        """The answers; vLLM's name of ``completions``."""
        return self.completions

    @property
    def text(self) -> str | None:
        """Text of the first answer."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first answer."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Finish reason of the first answer."""
        return self.completions[0].finish_reason

    @property
    def error(self) -> str:
        """Reason why the engine aborted an answer; empty if it aborted none."""
        return next((completion.error for completion in self.completions if completion.error), "")


@dataclass(eq=False, kw_only=True)
class CompletionState:
    """State of one answer during generation."""

    index: int
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""
    """Reason why the engine aborted the answer; see ``Completion``."""
    num_taken: int = 0
    """Number of tokens of the answer that deltas have returned."""
    num_dropped: int = 0
    """Number of tokens, from the beginning of the answer, whose logprobs were freed."""
    drafted: list[bool] = field(default_factory=list)
    """Whether each token of the answer is an accepted draft token."""
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    """Number of engine steps that produced tokens of the answer."""
    first_token_time: float = 0.0
    end_time: float = 0.0
    queue_seconds: float | None = None
    """Seconds that the answer spent in the engine's waiting queue."""


class RequestState:
    """State of a request during generation, with its answers so far.

    Args:
        tokenizer: the checkpoint's tokenizer; None if it has none, in which case stop strings are not possible.
        streams: whether ``take_delta`` will be called.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        streams: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.request, self._clock = request, clock
        sampling = request.sampling
        reads = tokenizer is not None and (sampling.stop or streams)
        self._make_decoder: Callable[[], TokenDecoder] | None = None
        if tokenizer is not None:
            make = tokenizer.further_decoder
            if request.is_chat:
                make = partial(tokenizer.reply_decoder, inside=request.continues_message)
            self._make_decoder = partial(make, with_special=not sampling.skip_special_tokens)
        self.answers = [
            CompletionState(
                index=index,
                detokenizer=Detokenizer(self._make_decoder(), sampling.stop, sampling.include_stop_str_in_output)
                if reads
                else None,
            )
            for index in range(sampling.num_choices)
        ]
        self._beams: list[FinishedBeam] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.num_cached_tokens = 0
        self.embedding: list[float] | None = None
        """Embedding of a pooling request; None until it is computed."""
        self._arrival_time = clock()

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the request's prompt."""
        return self.request.prompt_token_ids

    @property
    def is_done(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def first_token_time(self) -> float:
        """Time at which the first token of any answer arrived; 0 if none has arrived."""
        return min((answer.first_token_time for answer in self.answers if answer.first_token_time), default=0.0)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens of all answers so far."""
        answers = self._beams or self.answers
        return sum(len(answer.token_ids) for answer in answers)

    @property
    def num_drafted_tokens(self) -> int:
        """Number of tokens drafted for all answers so far."""
        return sum(answer.num_drafted for answer in self.answers)

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted draft tokens of all answers so far."""
        return sum(answer.num_accepted for answer in self.answers)

    @property
    def num_steps(self) -> int:
        """Number of engine steps that produced tokens of an answer, summed over all answers so far."""
        return sum(answer.num_steps for answer in self.answers)

    def add(self, update: AnswerUpdate) -> bool:
        """Apply an engine update to an answer.

        Returns whether a stop string has ended the answer. The engine does not look for stop strings, so the caller aborts the
        answer there.
        """
        answer, now = self.answers[update.index], self._clock()
        if not self.request.pooling:
            answer.first_token_time = answer.first_token_time or now
        if update.index == 0 and not answer.token_ids:  # not for a resumed answer: its own tokens are hits, too
            self.num_cached_tokens = update.num_cached_tokens
        answer.num_drafted += update.num_drafted
        answer.num_accepted += update.num_accepted
        answer.num_steps += bool(update.token_ids)
        answer.token_ids += update.token_ids
        answer.drafted += (number < update.num_accepted for number in range(len(update.token_ids)))
        answer.logprobs += update.logprobs
        if update.queue_seconds is not None:
            answer.queue_seconds = update.queue_seconds
        answer.finish_reason, answer.error = update.finish_reason, update.error
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self._beams, self.embedding = update.beams, update.embedding
        stopped = self._read(answer, update.token_ids)
        if stopped:
            answer.finish_reason = FinishReason.STOP  # a stop string takes precedence over the length limit
        if answer.finish_reason is not None:
            answer.end_time = now
        return stopped

    def take_delta(self, index: int, drops_logprobs: bool = False) -> Delta:
        """Return text and tokens of the answer ``index`` that are new since the last call for this answer.

        Args:
            drops_logprobs: whether to free the logprobs that the delta returns; the result of ``output`` then lacks them.
        """
        answer = self.answers[index]
        begin, answer.num_taken = answer.num_taken, len(answer.token_ids)
        ended, detokenizer = answer.finish_reason is not None, answer.detokenizer
        logprobs = None
        if self.request.sampling.logprobs is not None:
            logprobs = answer.logprobs[begin - answer.num_dropped :]
            if drops_logprobs:
                answer.logprobs, answer.num_dropped = [], answer.num_taken
        if detokenizer is not None and ended:
            detokenizer.finish()
        return Delta(
            key=self.request.key,
            index=index,
            text=detokenizer.take_new() if detokenizer else None,
            token_ids=answer.token_ids[begin:],
            finish_reason=answer.finish_reason.value if ended else None,
            logprobs=logprobs,
            stop_reason=self._stop_reason(answer) if ended else None,
            drafted=answer.drafted[begin:],
        )

    def output(self) -> RequestOutput | EmbeddingOutput:
        """Output of the request: all answers, or the embedding of a pooling request. Call it once the request is
        done."""
        sampling = self.request.sampling
        if self.request.pooling:
            return EmbeddingOutput(self.request.key, self.prompt_token_ids, self.embedding, self.num_cached_tokens)
        if self._beams:
            completions = [self._beam(index, beam) for index, beam in enumerate(self._beams)]
        else:
            completions = [self._completion(answer) for answer in self.answers]
        num_output_tokens = self.num_output_tokens
        if sampling.num_choices > sampling.n:
            ranked = sorted(zip(completions, self.answers, strict=True), key=lambda pair: -_mean_logprob(pair[1]))
            completions = [replace(pair[0], index=index) for index, pair in enumerate(ranked[: sampling.n])]
        return RequestOutput(
            key=self.request.key,
            prompt=self.request.prompt,
            prompt_token_ids=self.prompt_token_ids,
            completions=completions,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_steps=self.num_steps,
            num_output_tokens=num_output_tokens,
            time_to_first_token=self.first_token_time - self._arrival_time,
            time_per_output_token=max(map(self._time_per_token, self.answers)),
            total_time=max(answer.end_time for answer in self.answers) - self._arrival_time,
        )

    def _read(self, answer: CompletionState, token_ids: list[int]) -> bool:
        """Detokenize new tokens of an answer. Returns whether the new tokens complete a stop string; tokens after the stop string
        are dropped."""
        if answer.detokenizer is None:
            return False
        before = len(answer.token_ids) - len(token_ids)
        for number, token in enumerate(token_ids[: max(0, self._num_text_tokens(answer) - before)], before + 1):
            if answer.detokenizer.add(token, number > self.request.sampling.min_tokens):
                del answer.token_ids[number:], answer.drafted[number:]
                del answer.logprobs[number - answer.num_dropped :]
                return True
        return False

    def _completion(self, answer: CompletionState) -> Completion:
        text: str | None = None
        if answer.detokenizer is not None:
            answer.detokenizer.finish()
            text = answer.detokenizer.text
        elif self._make_decoder is not None:
            text = self._make_decoder().decode(answer.token_ids[: self._num_text_tokens(answer)])
        return Completion(
            index=answer.index,
            text=text,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason.value,
            stop_reason=self._stop_reason(answer),
            logprobs=None if self.request.sampling.logprobs is None else answer.logprobs,
            drafted=answer.drafted,
            error=answer.error,
        )

    def _beam(self, index: int, beam: FinishedBeam) -> Completion:
        last, sampling = beam.token_ids[-1], self.request.sampling
        stop_token = last if last in sampling.stop_token_ids else None
        dropped = stop_token is not None and not sampling.include_stop_str_in_output
        text = None
        if self._make_decoder is not None:
            text = self._make_decoder().decode(beam.token_ids[: len(beam.token_ids) - dropped])
        return Completion(
            index=index,
            text=text,
            token_ids=beam.token_ids,
            finish_reason=beam.finish_reason.value,
            stop_reason=stop_token,
            logprobs=None,
            score=beam.score,
            drafted=[False] * len(beam.token_ids),
        )

    def _stop_reason(self, answer: CompletionState) -> str | int | None:
        if answer.detokenizer is not None and answer.detokenizer.stopped_by is not None:
            return answer.detokenizer.stopped_by
        return answer.token_ids[-1] if self._ended_by_token(answer) else None

    def _time_per_token(self, answer: CompletionState) -> float:
        """Time per output token after the first (TPOT) of an answer, in seconds; 0 for an answer of one token."""
        answers = [beam.token_ids for beam in self._beams] or [answer.token_ids]
        after_first = max(map(len, answers)) - 1
        return (answer.end_time - answer.first_token_time) / after_first if after_first > 0 else 0.0

    def _num_text_tokens(self, answer: CompletionState) -> int:
        """Number of the answer's tokens that belong to its text. The last token does not if it is a visible stop token that the
        request excludes from the text."""
        sampling = self.request.sampling
        shows = self._ended_by_token(answer) or (
            not sampling.skip_special_tokens and answer.finish_reason is FinishReason.STOP
        )
        return len(answer.token_ids) - (shows and not sampling.include_stop_str_in_output)

    def _ended_by_token(self, answer: CompletionState) -> bool:
        """Whether one of the request's own ``stop_token_ids`` has ended the answer."""
        stops = self.request.sampling.stop_token_ids
        return answer.finish_reason is FinishReason.STOP and bool(stops) and answer.token_ids[-1] in stops


def _mean_logprob(answer: CompletionState) -> float:
    return fmean(measured.logprob for measured in answer.logprobs) if answer.logprobs else float("-inf")
