"""What a request may say: one schema with all its bounds, for JSONL lines and, later, HTTP bodies.

Two kinds of lines. Simple ones carry a prompt and sampling fields beside each other. Batch lines follow OpenAI's batch
input format (API reference, "Batch": ``custom_id``, ``method``, ``url``, ``body``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from labinfer.errors import UserError
from labinfer.plan import SamplingParams
from labinfer.text.tools import PastCall, ToolChoice, ToolList, ToolUse

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
EMBEDDINGS_URL = "/v1/embeddings"
MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_INPUTS = 2048
"""Texts or prompts of one embeddings request; OpenAI's bound."""
SAMPLING_FIELDS = tuple(field.name for field in msgspec.structs.fields(SamplingParams))

NEUTRAL_VALUES = {
    "stream": False,
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
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
    tool_calls: list[PastCall] | None = None
    """Of an assistant; its content may then be null."""
    tool_call_id: str | None = None
    """Which call a message of the role ``tool`` answers."""

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            message["content"] = content
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


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


class OpenAIBody(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The fields of OpenAI's bodies; for the second group see ``NEUTRAL_VALUES``."""

    model: str | None = None
    metadata: dict | None = None
    max_completion_tokens: int | None = None

    stream: bool | None = None
    suffix: str | None = None
    tools: list | None = None
    tool_choice: Any = None
    response_format: dict | None = None

    supported: ClassVar[tuple[str, ...]] = ()
    """Those of ``NEUTRAL_VALUES`` that may have other values in this kind of body."""

    def check_neutral(self) -> None:
        """Raises:
        UserError: a field that is not supported has a value that would change something.
        """
        for name, neutral in NEUTRAL_VALUES.items():
            if name in self.supported:
                continue
            value = getattr(self, name)
            if value is not None and (value != neutral or type(value) is not type(neutral)):  # 0 is not False here
                raise UserError(f"{name}={value!r:.60} is not supported; leave it out")


class CompletionBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int]


class ChatBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    top_logprobs: int | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    supported: ClassVar[tuple[str, ...]] = ("tools", "tool_choice")

    def prompt(self) -> dict[str, Any]:
        """The conversation and its tools, as ``RequestReader.read`` takes them.

        Raises:
            UserError: ``tools`` and ``tool_choice`` do not go together.
        """
        use = ToolUse(tools=self.tools, tool_choice=self.tool_choice, parallel_tool_calls=self.parallel_tool_calls)
        return {"messages": [message.as_dict() for message in self.messages]} | use.as_prompt()

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


_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
_INPUT_KINDS = [
    {"type": "string", "minLength": 1},
    _SEVERAL | {"items": {"type": "string", "minLength": 1}},
    _TOKEN_IDS,
    _SEVERAL | {"items": _TOKEN_IDS},
]
"""Of an embeddings request, as JSON schemas: msgspec's types have one list at most to choose from."""


class EmbeddingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's body of an embeddings request (API reference, "Create embeddings"), and ``pooling``."""

    input: Annotated[str | list[str | int | list[int]], msgspec.Meta(extra_json_schema={"oneOf": _INPUT_KINDS})]
    """A text, token ids, or a list of texts or of lists of token ids."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Only as many as the model has."""
    user: str | None = None
    pooling: Literal["last", "mean"] = "last"
    """See ``plan.POOLINGS``."""

    def prompts(self) -> list[dict[str, Any]]:
        """Each input as ``LLM.make_request`` takes a prompt, in order.

        Raises:
            UserError: there is none or too many, one is empty, or they are of several kinds.
        """
        inputs = self.input
        if isinstance(inputs, str) or (inputs and all(isinstance(one, int) for one in inputs)):
            inputs = [inputs]
        kinds = {type(one) for one in inputs}
        if len(kinds) > 1 or int in kinds:
            raise UserError("input mixes texts, token ids and lists of them; give all of one kind")
        if not 0 < len(inputs) <= MAX_INPUTS:
            raise UserError(f"input must have 1 to {MAX_INPUTS} texts or prompts, not {len(inputs)}")
        for index, one in enumerate(inputs):
            if not one:
                raise UserError(f"input {index} is empty; give at least one token")
        return [{"prompt" if str in kinds else "prompt_token_ids": one} for one in inputs]

    def check_dimensions(self, hidden_size: int) -> None:
        """Raises:
        UserError: other dimensions are wanted than the model has.
        """
        if self.dimensions not in (None, hidden_size):
            raise UserError(
                f"dimensions {self.dimensions} are not offered: this model's vectors have {hidden_size}; leave it out"
            )


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
    """None where there is an ``embedding``, which may have several."""
    sampling: SamplingParams
    id: str | int | None = None
    """A simple line's own id."""
    custom_id: str | None = None
    url: str | None = None
    model: str | None = None
    echo: bool = False
    priority: int = 0
    user: str = ""
    embedding: EmbeddingBody | None = None

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
        prompt = body.prompt()
        body.logprobs = body.count_logprobs()
        if body.echo:
            raise UserError("echo is for completions; a chat answer has no prompt text")
    elif parsed.url == EMBEDDINGS_URL:
        return _embedding(parsed)
    else:
        urls = f"{COMPLETIONS_URL}, {CHAT_URL} or {EMBEDDINGS_URL}"
        raise UserError(f"url {parsed.url!r:.60} is not supported; use {urls}")
    body.check_neutral()
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


def _embedding(line: BatchLine) -> ParsedLine:
    body = _decode(line.body, EmbeddingBody)
    return ParsedLine(
        None,
        SamplingParams(),
        custom_id=line.custom_id,
        url=line.url,
        model=body.model,
        user=body.user or "",
        embedding=body,
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
