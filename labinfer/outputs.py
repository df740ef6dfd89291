"""A request on rank 0, from its prompt to its answers: what is asked, what streams out, what comes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from labinfer.engine.beam_search import FinishedBeam
from labinfer.engine.request import FinishReason, Request
from labinfer.engine.sequence import Sequence
from labinfer.plan import TokenLogprobs
from labinfer.text.detokenizer import Detokenizer
from labinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Delta:
    """What one answer of a request has got since the last one; texts of an answer joined are its whole text."""

    key: Any
    index: int
    """Which of the request's answers."""
    text: str | None
    """None where the checkpoint has no tokenizer. Never half a character, nor the beginning of a stop string."""
    token_ids: list[int]
    finish_reason: str | None
    """Set with the last one."""


@dataclass(frozen=True)
class Completion:
    """One answer."""

    index: int
    text: str | None
    """None where the checkpoint has no tokenizer."""
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    """The stop string or stop token id that ended it; None if something else did."""
    logprobs: list[TokenLogprobs] | None
    """Of each token, where the request wants them."""
    score: float | None = None
    """With beam search; see ``SamplingParams.length_penalty``."""


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. Times in seconds."""

    key: Any
    prompt_token_ids: list[int]
    completions: list[Completion]
    """As many as ``n`` says; with ``best_of`` and beam search the best first."""
    prompt_logprobs: list[TokenLogprobs] | None
    """Of each prompt token but the first, where the request wants them."""
    num_cached_tokens: int
    """Prompt tokens that were found in the KV cache; of the first answer."""
    num_output_tokens: int
    """Of all answers, those that ``best_of`` drops included."""
    time_to_first_token: float
    time_per_output_token: float
    """Mean over the tokens after the first, of the slowest answer; 0 for a single token."""
    total_time: float

    @property
    def text(self) -> str | None:
        """The first answer's."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str:
        """The first answer's."""
        return self.completions[0].finish_reason


class OpenRequest:
    """A request whose answers are being generated.

    Args:
        sequences: one for each answer, in order.
        tokenizer: None where the checkpoint has none; there are no stop strings then.
        streams: whether ``take_delta`` will be called.
    """

    def __init__(self, request: Request, sequences: list[Sequence], tokenizer: Tokenizer | None, streams: bool):
        self.request, self._sequences, self._tokenizer = request, sequences, tokenizer
        sampling = request.sampling
        self._detokenizers: dict[int, Detokenizer] = {}
        if tokenizer is not None and (sampling.stop or streams):
            for sequence in sequences:
                self._detokenizers[sequence.seq_id] = Detokenizer(
                    tokenizer, sampling.stop, sampling.include_stop_str_in_output
                )
        self._num_streamed = {sequence.seq_id: 0 for sequence in sequences}
        self._end_times: dict[int, float] = {}

    def add_token(self, sequence: Sequence) -> bool:
        """Look at a sequence's new token. Returns whether it completes a stop string."""
        if not sequence.first_token_time:
            sequence.first_token_time = time.monotonic()
        detokenizer = self._detokenizers.get(sequence.seq_id)
        if detokenizer is None or self._num_text_tokens(sequence) < sequence.num_output_tokens:
            return False
        may_stop = sequence.num_output_tokens > sequence.sampling.min_tokens
        return detokenizer.add(sequence.token_ids[-1], may_stop)

    def take_delta(self, sequence: Sequence) -> Delta:
        """What came since the last call."""
        begin, self._num_streamed[sequence.seq_id] = self._num_streamed[sequence.seq_id], sequence.num_output_tokens
        detokenizer = self._detokenizers.get(sequence.seq_id)
        if detokenizer is not None and sequence.finish_reason is not None:
            detokenizer.finish()
        return Delta(
            key=self.request.key,
            index=self._sequences.index(sequence),
            text=detokenizer.take_new() if detokenizer else None,
            token_ids=sequence.output_ids[begin:],
            finish_reason=sequence.finish_reason.value if sequence.finish_reason else None,
        )

    def close(self, sequence: Sequence) -> bool:
        """This answer is complete. Returns whether it was the last one."""
        self._end_times[sequence.seq_id] = time.monotonic()
        return len(self._end_times) == len(self._sequences)

    def output(self) -> RequestOutput:
        """All answers, once all are closed."""
        first, sampling = self._sequences[0], self.request.sampling
        if first.beams is not None:
            completions = [self._beam(index, beam) for index, beam in enumerate(first.beams.finished[: sampling.n])]
        else:
            completions = [self._completion(index, sequence) for index, sequence in enumerate(self._sequences)]
        num_output_tokens = sum(len(completion.token_ids) for completion in completions)
        if sampling.num_choices > sampling.n:
            ranked = sorted(zip(completions, self._sequences, strict=True), key=lambda pair: -_mean_logprob(pair[1]))
            completions = [replace(pair[0], index=index) for index, pair in enumerate(ranked[: sampling.n])]
        return RequestOutput(
            key=self.request.key,
            prompt_token_ids=self.request.prompt_token_ids,
            completions=completions,
            prompt_logprobs=None if sampling.prompt_logprobs is None else first.prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            num_output_tokens=num_output_tokens,
            time_to_first_token=min(s.first_token_time for s in self._sequences) - first.arrival_time,
            time_per_output_token=max(map(self._time_per_token, self._sequences)),
            total_time=max(self._end_times.values()) - first.arrival_time,
        )

    def _completion(self, index: int, sequence: Sequence) -> Completion:
        detokenizer = self._detokenizers.get(sequence.seq_id)
        text: str | None = None
        if detokenizer is not None:
            detokenizer.finish()
            text = detokenizer.text
        elif self._tokenizer is not None:
            text = self._tokenizer.decode(sequence.output_ids[: self._num_text_tokens(sequence)])
        stop_reason: str | int | None = detokenizer.stopped_by if detokenizer else None
        if stop_reason is None and _ended_by_token(sequence):
            stop_reason = sequence.token_ids[-1]
        return Completion(
            index=index,
            text=text,
            token_ids=sequence.output_ids,
            finish_reason=sequence.finish_reason.value,
            stop_reason=stop_reason,
            logprobs=None if sequence.sampling.logprobs is None else sequence.logprobs,
        )

    def _beam(self, index: int, beam: FinishedBeam) -> Completion:
        last, sampling = beam.token_ids[-1], self.request.sampling
        stop_token = last if last in sampling.stop_token_ids else None
        dropped = stop_token is not None and not sampling.include_stop_str_in_output
        text = None
        if self._tokenizer is not None:
            text = self._tokenizer.decode(beam.token_ids[: len(beam.token_ids) - dropped])
        return Completion(index, text, beam.token_ids, beam.finish_reason.value, stop_token, None, beam.score)

    def _time_per_token(self, sequence: Sequence) -> float:
        """Mean over the tokens after the first, 0 if there is none."""
        answers = [beam.token_ids for beam in sequence.beams.finished] if sequence.beams else [sequence.output_ids]
        after_first = max(map(len, answers)) - 1
        return (self._end_times[sequence.seq_id] - sequence.first_token_time) / after_first if after_first else 0.0

    def _num_text_tokens(self, sequence: Sequence) -> int:
        """Output tokens that belong to the text: all but a stop token that is not to be included."""
        ended = _ended_by_token(sequence) and not sequence.sampling.include_stop_str_in_output
        return sequence.num_output_tokens - ended


def _ended_by_token(sequence: Sequence) -> bool:
    """Whether one of the request's own stop tokens ended it."""
    return sequence.finish_reason is FinishReason.STOP and sequence.token_ids[-1] in sequence.sampling.stop_token_ids


def _mean_logprob(sequence: Sequence) -> float:
    return fmean(measured.logprob for measured in sequence.logprobs) if sequence.logprobs else float("-inf")
