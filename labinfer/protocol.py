"""What a request may say: one schema with all its bounds, for JSONL lines and, later, HTTP bodies.

Two kinds of lines. Simple ones carry a prompt and sampling fields beside each other. Batch lines follow OpenAI's batch
input format (API reference, "Batch": ``custom_id``, ``method``, ``url``, ``body``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from labinfer.errors import UserError
from labinfer.plan import SamplingParams
from labinfer.structured_outputs import StructuredOutputs

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
MAX_LINE_BYTES = 64 * 1024 * 1024
SAMPLING_FIELDS = tuple(field.name for field in msgspec.structs.fields(SamplingParams))

NEUTRAL_VALUES = {
    "stream": False,
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
}
"""Fields of OpenAI's bodies that are accepted only with the value that changes nothing."""


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    type: str = "text"


class Message(msgspec.Struct, omit_defaults=True):
    """A chat message; other keys are dropped."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {"role": self.role, "content": content or ""} | ({"name": self.name} if self.name else {})


class Sampling(msgspec.Struct, kw_only=True):
    """The sampling fields every kind of request may have, those of ``SamplingParams``; None takes the default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: str | list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: dict[str, Any] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    max_context_len: int | None = None
    logprobs: Any = None
    """A count; in OpenAI's chat bodies true, beside ``top_logprobs``."""
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    """With ``--scheduling-policy priority`` the lowest goes first."""
    user: str | None = None
    """With ``--scheduling-policy fair`` users take turns."""
    cache_salt: str | None = None
    """Only requests with the same salt find each other's tokens in the KV cache."""
    echo: bool | None = None
    """The answer's text begins with the prompt's."""

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """These fields over ``defaults``, checked.

        Raises:
            UserError: a field is out of bounds.
        """
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(**({name: getattr(defaults, name) for name in SAMPLING_FIELDS} | given))


class SimpleLine(Sampling, kw_only=True, forbid_unknown_fields=True):
    """``{"prompt": …}``, ``{"prompt_token_ids": […]}`` or ``{"messages": […]}``, with an ``id`` if you like."""

    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[Message] | None = None


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema in OpenAI's wrapping; name and description are for people. Answers keep to it, strict or not."""

    name: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
    description: str | None = None
    schema: dict[str, Any] | None = None
    """None: any JSON object."""
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON by a schema."""

    json_schema: NamedSchema


class OpenAIBody(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The fields of OpenAI's bodies; for the second group see ``NEUTRAL_VALUES``."""

    model: str | None = None
    metadata: dict | None = None
    max_completion_tokens: int | None = None

    stream: bool | None = None
    suffix: str | None = None
    tools: list | None = None
    tool_choice: Any = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None

    def wanted_form(self) -> StructuredOutputs | None:
        """``response_format`` and ``structured_outputs`` as one.

        Raises:
            UserError: both are given, or a schema is out of its bounds.
        """
        wanted = self.response_format
        if wanted is None or isinstance(wanted, TextFormat):
            return self.structured_outputs
        if self.structured_outputs is not None:
            raise UserError("response_format and structured_outputs both say what an answer must be; leave one out")
        schema = wanted.json_schema.schema if isinstance(wanted, JsonSchemaFormat) else None
        return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=schema)

    def check_neutral(self) -> None:
        """Raises:
        UserError: a field that is not supported has a value that would change something.
        """
        for name, neutral in NEUTRAL_VALUES.items():
            value = getattr(self, name)
            if value is not None and (value != neutral or type(value) is not type(neutral)):  # 0 is not False here
                raise UserError(f"{name}={value!r:.60} is not supported; leave it out")


class CompletionBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int]


class ChatBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    top_logprobs: int | None = None

    def count_logprobs(self) -> int | None:
        """``logprobs`` and ``top_logprobs`` as the one count that ``SamplingParams`` has.

        Raises:
            UserError: ``logprobs`` is neither true nor false, or ``top_logprobs`` stands alone.
        """
        if self.logprobs not in (None, False, True) or type(self.logprobs) is int:
            raise UserError(f"logprobs must be true or false in a chat request, not {self.logprobs!r:.60}")
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("top_logprobs needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of OpenAI's batch input."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchProbe(msgspec.Struct):
    """Enough of a line to tell which kind it is."""

    custom_id: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True)
class ParsedLine:
    """A request as a line asks for it."""

    prompt: Any
    sampling: SamplingParams
    id: str | int | None = None
    """A simple line's own id."""
    custom_id: str | None = None
    url: str | None = None
    model: str | None = None
    echo: bool = False
    priority: int = 0
    user: str = ""

    @property
    def is_batch(self) -> bool:
        return self.custom_id is not None


def parse_line(line: bytes, defaults: SamplingParams) -> ParsedLine:
    """Read one JSONL line.

    Raises:
        UserError: it is no JSON object, has a field that is unknown or out of bounds, or asks for what is not offered.
    """
    if len(line) > MAX_LINE_BYTES:
        raise UserError(f"the line has {len(line)} bytes; at most {MAX_LINE_BYTES} are read")
    kind = BatchLine if _is_batch(line) else SimpleLine
    parsed = _decode(line, kind)
    if isinstance(parsed, SimpleLine):
        return _simple(parsed, defaults)
    if parsed.method != "POST":
        raise UserError(f"method {parsed.method!r:.40} is not supported; use POST")
    if parsed.url == COMPLETIONS_URL:
        body = _decode(parsed.body, CompletionBody)
        prompt = {"prompt": body.prompt} if isinstance(body.prompt, str) else {"prompt_token_ids": body.prompt}
        body.logprobs = None if body.logprobs is False else body.logprobs
    elif parsed.url == CHAT_URL:
        body = _decode(parsed.body, ChatBody)
        prompt = {"messages": [message.as_dict() for message in body.messages]}
        body.logprobs = body.count_logprobs()
        if body.echo:
            raise UserError("echo is for completions; a chat answer has no prompt text")
    else:
        raise UserError(f"url {parsed.url!r:.60} is not supported; use {COMPLETIONS_URL} or {CHAT_URL}")
    body.check_neutral()
    body.structured_outputs = body.wanted_form()
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        body.prompt_logprobs = body.logprobs  # OpenAI's echo brings the prompt's too
    prompt |= {"cache_salt": body.cache_salt} if body.cache_salt else {}
    if body.max_tokens is None:
        body.max_tokens = body.max_completion_tokens
    return ParsedLine(
        prompt,
        body.params(defaults),
        custom_id=parsed.custom_id,
        url=parsed.url,
        model=body.model,
        echo=bool(body.echo),
        priority=body.priority or 0,
        user=body.user or "",
    )


def custom_id_of(line: bytes) -> str | None:
    """The ``custom_id`` of a batch line, so that even a refused one can be answered by it."""
    custom_id = _field(line, "custom_id")
    return custom_id if isinstance(custom_id, str) else None


def own_id_of(line: bytes) -> str | int | None:
    """The ``id`` of a simple line, so that even a refused one can be answered by it."""
    own_id = _field(line, "id")
    return own_id if isinstance(own_id, (str, int)) and not isinstance(own_id, bool) else None


def _field(line: bytes, name: str):
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value.get(name) if isinstance(value, dict) else None


def _simple(line: SimpleLine, defaults: SamplingParams) -> ParsedLine:
    prompt = {
        "prompt": line.prompt,
        "prompt_token_ids": line.prompt_token_ids,
        "messages": None if line.messages is None else [message.as_dict() for message in line.messages],
        "cache_salt": line.cache_salt,
    }
    return ParsedLine(
        {key: value for key, value in prompt.items() if value is not None},
        line.params(defaults),
        id=line.id,
        echo=bool(line.echo),
        priority=line.priority or 0,
        user=line.user or "",
    )


def _is_batch(line: bytes) -> bool:
    try:
        probe = msgspec.json.decode(line, type=BatchProbe)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the full reading says what is wrong
    return bool(bytes(probe.custom_id) or bytes(probe.body))


def _decode(data: bytes | msgspec.Raw, kind: type):
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise UserError(str(error)) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}") from None
