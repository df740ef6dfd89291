"""RequestMaker: makes all requests of a benchmark on rank 0 before the first one runs, so that errors show at once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.cli.bench.model import BenchModel
from labinfer.cli.bench.options import BenchOptions
from labinfer.engine.request import Request
from labinfer.planner.workload import RequestLengths, Workload, read_workload
from labinfer.requests.jsonl import parse_line
from labinfer.requests.prompts import TokensPrompt

WARM_UP = -1
"""``Request.key`` of warm-up requests, which are excluded from the measurement."""
SHARED_BLOCK = 512
"""Number of prompt tokens to which one hash id in a Mooncake trace belongs."""


class RequestMaker:
    """Makes requests for benchmarks: with random prompts, or from files. The requests depend on the seed and not on the layout."""

    def __init__(self, llm: BenchModel, options: BenchOptions):
        self._llm, self._options = llm, options
        self._draw = random.Random(options.seed)
        self._vocabulary = range(llm.spec.vocab_size)
        self._shared_block = cache(self._make_shared_block)

    def random(self, key: int) -> Request:
        """Make a request with ``--input-len`` random prompt ids and ``--output-len`` output tokens.

        Raises:
            UserError: the request is too long for the model.
        """
        length, room = self._options.input_len + self._options.output_len, self._llm.spec.max_model_len
        if length > room:
            raise UserError(
                f"--input-len {self._options.input_len} and --output-len {self._options.output_len} make {length} tokens, more than "
                f"the context length of {room}; give smaller ones"
            )
        prompt = self._draw.choices(self._vocabulary, k=self._options.input_len)
        return self._llm.make_request(key, TokensPrompt(prompt), self._sampling())

    def dataset(self, path: str, count: int) -> list[Request]:
        """Read the first ``count`` requests of a JSONL file. Their keys count from 0.

        Raises:
            UserError: the file cannot be read, or a line is not a request that the model can run.
        """
        try:
            lines = Path(path).read_bytes().split(b"\n")
        except OSError as error:
            raise UserError(f"cannot read --dataset {path}: {error.strerror}") from None
        requests = []
        for number, line in enumerate(lines, 1):
            if not line.strip() or len(requests) == count:
                continue
            try:
                parsed = parse_line(line.strip(), self._sampling())
                if parsed.embedding is not None or parsed.scoring is not None:
                    raise UserError("embedding and score requests generate no tokens to measure; remove this line")
                requests.append(self._llm.make_request(len(requests), parsed.prompt, parsed.sampling))
            except UserError as error:
                raise UserError(f"--dataset {path}, line {number}: {error}") from None
        if not requests:
            raise UserError(f"--dataset {path} is empty; give a JSONL file of requests")
        return requests

    def workload(self, path: str, count: int) -> tuple[list[Request], list[float] | None]:
        """Read the first ``count`` requests of a file with request lengths. Returns the requests (keys count from 0) and their
        arrival times in seconds from the first arrival (None if the file has no arrival times).

        Prompt blocks with equal hash ids have equal tokens, so that the prefix cache can hit. Parts of prompts that the trace
        counts as cache hits also have equal tokens.

        Raises:
            UserError: the file cannot be read, or a request is too long for the model.
        """
        lengths = Workload(read_workload(path, self._options.output_len).requests[:count])
        lengths.check(self._llm.spec.max_model_len)
        requests, arrivals = [], [request.arrival for request in lengths.requests]
        for key, request in enumerate(lengths.requests):
            prompt = self._shared_prompt(request)
            prompt += self._draw.choices(self._vocabulary, k=request.prompt - len(prompt))
            requests.append(self._llm.make_request(key, TokensPrompt(prompt), self._sampling(request.output)))
        return requests, None if None in arrivals else [when - arrivals[0] for when in arrivals]

    def _shared_prompt(self, request: RequestLengths) -> list[int]:
        """Token ids of the prompt prefix that ``request`` shares with other requests: its blocks with hash ids, or else the first
        ``request.cached`` tokens of a text common to all requests."""
        if request.hash_ids:
            blocks, length = map(self._shared_block, request.hash_ids), request.prompt
        else:
            blocks, length = map(self._shared_block, itertools.count(step=-1, start=-1)), request.cached
        return list(itertools.islice(itertools.chain.from_iterable(blocks), length))

    def _make_shared_block(self, number: int) -> list[int]:
        return random.Random(number).choices(self._vocabulary, k=SHARED_BLOCK)

    def _sampling(self, output_len: int = 0) -> SamplingParams:
        return SamplingParams(max_tokens=output_len or self._options.output_len, ignore_eos=True)


def until_idle(llm: BenchModel) -> Iterator[None]:
    """Yield None as long as the engine has work. As the argument ``requests`` of ``LLM.run``, it lets open requests finish and adds
    none."""
    while llm.engine.has_work:
        yield None
