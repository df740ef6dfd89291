"""Workload: prompt lengths, output lengths and arrival times of requests, from traces or JSONL jobs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError

DEFAULT_PROMPT, DEFAULT_OUTPUT = 512, 128
"""Default numbers of prompt tokens and of generated tokens of a request whose length is unknown."""
AZURE = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
"""Columns of the traces of Azure's inference service of 2023 and 2024."""
BURST_GPT = {"Timestamp", "Request tokens", "Response tokens"}
"""Columns of BurstGPT that are read."""
FORMS = "Azure's or BurstGPT's CSV, Mooncake's JSONL, or JSONL with prompts or with prompt_tokens and output_tokens in each line"
CountTokens = Callable[[str], int]
"""Counts the prompt tokens of a job line, given as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLengths:
    """Lengths of one request in tokens, and its arrival."""

    prompt: int
    """Prompt tokens, cached ones included."""
    output: int
    """Generated tokens, at least 1."""
    arrival: float | None = None
    """Seconds since the first request; None if all requests arrive at the start."""
    cached: int = 0
    """Prompt tokens found in the prefix cache, which the model does not compute."""
    hash_ids: tuple[int, ...] = ()
    """Ids of blocks of 512 prompt tokens in Mooncake's traces: equal ids mean equal tokens."""


@dataclass(frozen=True, kw_only=True)
class MeanRequest:
    """Means over the requests of a workload, from which step times are estimated."""

    prompt: float
    """Prompt tokens that are computed, not cached."""
    output: float
    decode_context: float
    """Mean context length at which an output token is generated. It is also the mean number of KV tokens of a request while it
    decodes."""
    prompt_context: float
    """Mean number of earlier tokens that a computed prompt token attends to."""


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival."""

    requests: tuple[RequestLengths, ...] = (RequestLengths(prompt=DEFAULT_PROMPT, output=DEFAULT_OUTPUT),)

    @cached_property
    def mean(self) -> MeanRequest:
        """Means over the requests; contexts are weighted by tokens."""
        count = len(self.requests)
        prompts = sum(request.prompt - request.cached for request in self.requests)
        outputs = sum(request.output for request in self.requests)
        decoded = sum(r.output * (r.prompt + r.output / 2) for r in self.requests)
        return MeanRequest(
            prompt=prompts / count,
            output=outputs / count,
            decode_context=decoded / outputs,
            prompt_context=sum((r.prompt**2 - r.cached**2) / 2 for r in self.requests) / max(1, prompts),
        )

    def check(self, max_model_len: int) -> None:
        """Check that every request fits in the context.

        Raises:
            UserError: a request is too long.
        """
        longest = max(self.requests, key=lambda request: request.prompt + request.output)
        if longest.prompt + longest.output > max_model_len:
            raise UserError(
                f"the workload has a request of {longest.prompt} + {longest.output} tokens, more than the context "
                f"length of {max_model_len}; leave such requests out, or give a larger --max-model-len"
            )


def read_workload(path: str, default_output: int = DEFAULT_OUTPUT, count_tokens: CountTokens | None = None) -> Workload:
    """The requests in a file: a trace as CSV (Azure, BurstGPT), or JSONL (Mooncake, a job, or lengths).

    Args:
        default_output: output tokens of a request whose line has no output length.
        count_tokens: counts the prompt tokens of a line that has a text instead of a number.

    Raises:
        UserError: the file cannot be read, or has an unknown format.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            opening = next(filter(str.strip, file), "")
            file.seek(0)
            is_jsonl = opening.lstrip().startswith("{")
            read = _read_jsonl(file, path, default_output, count_tokens) if is_jsonl else _read_csv(file, path)
            requests = list(read)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; a workload is {FORMS}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a workload: {error}; give {FORMS}") from None
    if not requests:
        raise UserError(f"{path} has no requests; give {FORMS}")
    if all(request.arrival is not None for request in requests):
        requests.sort(key=lambda request: request.arrival)
    return Workload(tuple(requests))


def _read_csv(file: Iterator[str], path: str) -> Iterator[RequestLengths]:
    rows = csv.DictReader(file)
    columns = set(rows.fieldnames or ())
    if columns >= AZURE:
        names, seconds = ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _parse_timestamp
    elif columns >= BURST_GPT:
        names, seconds = ("Timestamp", "Request tokens", "Response tokens"), float
    else:
        raise UserError(f"{path} has the columns {', '.join(sorted(columns)) or 'of nothing'}; give {FORMS}")
    first = None
    for row in rows:
        try:
            when, prompt, output = seconds(row[names[0]]), int(row[names[1]]), int(row[names[2]])
            if not math.isfinite(when):
                raise ValueError
        except (TypeError, ValueError):
            raise UserError(f"{path}:{rows.line_num} is not a row of such a trace; give {FORMS}") from None
        if prompt < 1 or output < 1:  # failed requests of BurstGPT have no response
            continue
        first = when if first is None else first
        yield RequestLengths(prompt=prompt, output=output, arrival=when - first)


def _parse_timestamp(text: str) -> float:
    """Seconds since the epoch of a timestamp such as ``2023-11-16 18:15:46.6805900``, whose fraction has more digits than Python
    parses."""
    whole, _, fraction = text.partition("+")[0].partition(".")
    return datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp() + (
        float(f"0.{fraction}") if fraction else 0.0
    )


def _read_jsonl(
    file: Iterator[str], path: str, default_output: int, count_tokens: CountTokens | None
) -> Iterator[RequestLengths]:
    first = None
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            values = values.get("body", values)
            prompt = _first(values, "input_length", "prompt_tokens")
            if prompt is None:
                if not values.keys() & {"prompt", "prompt_token_ids", "messages"}:
                    raise ValueError
                if count_tokens is None:
                    raise UserError(
                        "prompts are tokenized only by plan --auto without --cluster; give prompt_tokens and output_tokens "
                        "in each line"
                    )
                prompt = count_tokens(line)
            prompt, cached = _count(prompt), values.get("cached_tokens") or 0
            if not isinstance(cached, int) or not 0 <= cached < prompt:
                raise ValueError
            output = _first(values, "output_length", "output_tokens", "max_completion_tokens", "max_tokens")
            request = RequestLengths(
                prompt=prompt,
                cached=cached,
                output=_count(default_output if output is None else output),
                arrival=None if (when := values.get("timestamp")) is None else float(when) / 1000,
                hash_ids=tuple(map(int, values.get("hash_ids", ()))),
            )
            if request.arrival is not None and not math.isfinite(request.arrival):
                raise ValueError
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from None
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise UserError(f"{path}:{number} is not a request of a workload; give {FORMS}") from None
        if request.arrival is not None:
            first = request.arrival if first is None else first
            request = replace(request, arrival=request.arrival - first)
        yield request


def _first(values: dict[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _count(number: Any) -> int:
    """``number``, checked to be an integer of at least 1.

    Raises:
        ValueError: ``number`` is no such integer.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError
    return number
