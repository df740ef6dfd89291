"""Verification of a job: compares its output lines with recomputed lines, token by token and log-probability by log-probability."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from labinfer.api.batch.recorded_job import RecordedJob, RecordedLine
from labinfer.base.errors import UserError
from labinfer.launch.fingerprint import KERNELS, SEPARATOR, VERSION, Fingerprint, file_part
from labinfer.weights.identity import Identity, compare

HARMLESS_PARTS = (KERNELS, VERSION)
"""Parts of a fingerprint that may differ although all answers are bitwise equal. ``verify`` recomputes lines only if no other part
differs."""
CONTENT_KEYS = ("text", "message", "reasoning", "finish_reason", "stop_reason", "score")
"""Fields of a choice that are compared after its tokens and log-probabilities."""
NOTHING = "nothing"


@dataclass(frozen=True)
class Difference:
    """The first difference between two output lines. ``expected`` and ``recomputed`` are values as text."""

    where: str
    expected: str
    recomputed: str


@dataclass
class RecomputedLines:
    """Receives the output lines of a ``BatchJob`` in memory, in place of a ``JobOutput``."""

    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Output lines by the number of their input line, as they would be after writing and reading a JSONL file."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """Always empty. In a ``JobOutput``, digests of input lines that an earlier run has answered."""
    is_terminal: bool = False

    def write(self, record: dict[str, Any], number: int, digest: bytes = b"", failed: bool = False) -> None:
        """Store the output record of input line ``number``."""
        self.records[number] = json.loads(json.dumps(record))


def describe_changes(job: RecordedJob, now: Fingerprint, model: Identity) -> dict[str, str]:
    """For each part of the fingerprint that differs between the recorded job and ``now``, a text that describes the change, by the
    part's name.

    Args:
        now: fingerprint of the loaded model, with the sampling defaults of the job.
        model: identity of the files of the loaded model.
    """
    changes = {}
    for part, (old, new) in job.run.fingerprint.differences(now).items():
        labels = {label for label in job.model.keys() | model.keys() if file_part(label) == part}
        before, here = ({label: files[label] for label in labels & files.keys()} for files in (job.model, model))
        files = compare(before, here).describe() if labels else ""
        changes[part] = files or _change(old, new)
    return changes


def _change(before: str, now: str) -> str:
    """Describe how a part of a fingerprint changed from ``before`` to ``now``. If the part is a list of names, only names that
    differ are shown."""
    old, new = before.split(SEPARATOR), now.split(SEPARATOR)
    gone, added = ([name for name in own if name not in other] for own, other in ((old, new), (new, old)))
    return f"was {SEPARATOR.join(gone) or NOTHING}, is {SEPARATOR.join(added) or NOTHING}"


def check_complete(lines: Sequence[RecordedLine], output: str) -> None:
    """Check that every recorded output line has the token ids or embeddings that ``find_difference`` compares.

    Raises:
        UserError: a line has no token ids, or is not an output line of a job.
    """
    for line in lines:
        where = f"line {line.output_number} of {output}"
        try:
            answers = _vectors(line.record) or _choices(line.record)
            is_complete = bool(answers) and all(
                isinstance(answer, str | list) or isinstance(answer["token_ids"], list) for answer in answers
            )
        except (KeyError, TypeError, AttributeError):
            is_complete = False
        if not is_complete:
            raise UserError(
                f"{where} has no answer with token_ids, as a job with --reproducible writes it; restore the output"
            )


def find_difference(recorded: dict[str, Any], new_record: dict[str, Any]) -> Difference | None:
    """The first difference between a recorded output line and the recomputed one, in tokens, log-probabilities or text; None if
    they are equal."""
    if (error := _error(new_record)) is not None:
        return Difference("answer", "an answer", error)
    old_vectors, new_vectors = _vectors(recorded), _vectors(new_record)
    if old_vectors or new_vectors:
        return _first("number {} of the embeddings or scores", _flat(old_vectors), _flat(new_vectors))
    old_choices, new_choices = _choices(recorded), _choices(new_record)
    if len(old_choices) != len(new_choices):
        return Difference("number of choices", f"{len(old_choices)}", f"{len(new_choices)}")
    for index, (old, new) in enumerate(zip(old_choices, new_choices, strict=True)):
        of_choice = f" of choice {index}" if len(old_choices) > 1 else ""
        difference = (
            _first(f"token {{}}{of_choice}", old["token_ids"], new["token_ids"])
            or _first(f"log-probabilities of token {{}}{of_choice}", _logprobs(old), _logprobs(new))
            or _content_difference(old, new, of_choice)
        )
        if difference is not None:
            return difference
    return _first("log-probabilities of prompt token {}", *map(_prompt_logprobs, (recorded, new_record)))


def count_compared(record: dict[str, Any]) -> tuple[int, int]:
    """Number of compared tokens of an output line, and how many of these have log-probabilities."""
    choices = [] if _vectors(record) else _choices(record)
    return sum(len(choice["token_ids"]) for choice in choices), sum(len(_logprobs(choice)) for choice in choices)


def _first(where: str, before: Sequence[Any], now: Sequence[Any]) -> Difference | None:
    """Difference at the first position, counted from 1, at which two lists differ; None if they are equal.

    Args:
        where: text that names a position, with ``{}`` for the position's number.
    """
    for number, (old, new) in enumerate(zip_longest(before, now, fillvalue=NOTHING), 1):
        if old != new:
            return Difference(where.format(number), f"{old}", f"{new}")
    return None


def _content_difference(before: dict[str, Any], now: dict[str, Any], of_choice: str) -> Difference | None:
    for key in CONTENT_KEYS:
        old, new = (_without_call_ids(choice.get(key, NOTHING)) for choice in (before, now))
        if old != new:
            return Difference(f"{key}{of_choice}", f"{old!r}", f"{new!r}")
    return None


def _without_call_ids(value: Any) -> Any:
    """Copy of the JSON ``value`` without ids of tool calls, which are random."""
    if not isinstance(value, dict) or not isinstance(value.get("tool_calls"), list):
        return value
    calls = [{key: item for key, item in call.items() if key != "id"} for call in value["tool_calls"]]
    return value | {"tool_calls": calls}


def _body(record: dict[str, Any]) -> dict[str, Any]:
    return record["response"]["body"] if "response" in record else record


def _error(record: dict[str, Any]) -> str | None:
    error = _body(record).get("error")
    return error["message"] if error else None


def _choices(record: dict[str, Any]) -> list[dict[str, Any]]:
    body = _body(record)
    return body.get("choices") or [body]


def _vectors(record: dict[str, Any]) -> list[Any]:
    """Embeddings of an output line (lists of numbers, or base64 texts), or its scores, in lists. Empty for an output line of another
    endpoint."""
    body = _body(record)
    if ranked := body.get("results"):
        return [[item["relevance_score"]] for item in sorted(ranked, key=lambda item: item["index"])]
    items = body.get("data") or []
    return [[item["score"]] if "score" in item else item.get("probs") or item["embedding"] for item in items]


def _prompt_logprobs(record: dict[str, Any]) -> list[Any]:
    """Log-probabilities of prompt tokens, by position. A chat response has them in its body, a completion in each of its
    choices."""
    body = _body(record)
    return body.get("prompt_logprobs") or [
        entry for choice in body.get("choices", []) for entry in choice.get("prompt_logprobs") or []
    ]


def _flat(vectors: list[Any]) -> list[Any]:
    return [number for vector in vectors for number in ([vector] if isinstance(vector, str) else vector)]


def _logprobs(choice: dict[str, Any]) -> list[Any]:
    """Log-probabilities of the tokens of a choice, by position. A choice in a simple line, of a chat and of a completion has them
    in different fields."""
    logprobs = choice.get("logprobs") or []
    if isinstance(logprobs, list):
        return logprobs
    if "content" in logprobs:
        return logprobs["content"]
    return [list(of_token) for of_token in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)]
