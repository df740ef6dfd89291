"""JSONL lines of jobs: simple lines (a prompt, and sampling fields next to it), and lines of OpenAI's batch input format.

See "Batch" in OpenAI's API reference: ``custom_id``, ``method``, ``url``, ``body``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.requests.generation_input import GenerationInput, read_chat, read_completion
from labinfer.requests.json_decode import decode_json
from labinfer.requests.prompts import (
    PROMPT_KEYS,
    ChatPrompt,
    Prompt,
    ReasoningEffort,
    TemplateKwargs,
    TemplateUse,
    TextPrompt,
    TokensPrompt,
    check_template_use,
    only_key,
)
from labinfer.requests.protocol import (
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    MAX_TOKEN_IDS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    RequestFields,
)
from labinfer.requests.score_bodies import SCORE_BODIES, ScoreRequest
from labinfer.text.messages import MAX_MESSAGES, Message


class SimpleLine(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """A line in LABInfer's simple format: ``prompt``, ``prompt_token_ids`` or ``messages``, an optional ``id``, and sampling
    fields."""

    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKEN_IDS)] | None = None
    messages: Annotated[list[Message], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Length of the reasoning, as in a chat request; a variable of the chat template."""


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line in OpenAI's batch input format: a ``body`` for the endpoint ``url``."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchProbe(msgspec.Struct):
    """Schema of the fields that show whether a line is a batch line."""

    custom_id: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()


class _Ids(msgspec.Struct):
    """Schema of the ids of a line, for its error record."""

    custom_id: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, kw_only=True)
class ParsedLine(GenerationInput):
    """The request of a JSONL line. For a line with the ``url`` of embeddings, ``embedding`` holds the inputs, and ``prompts`` is
    empty."""

    id: str | int | None = None
    """The ``id`` of a simple line, if it has one."""
    custom_id: str | None = None
    url: str | None = None
    embedding: EmbeddingBody | None = None
    scoring: ScoreRequest | None = None
    """Body of a line with a URL of scores or classes; ``prompts`` is then empty, too."""

    @property
    def is_batch(self) -> bool:
        return self.custom_id is not None


def parse_line(line: bytes, defaults: SamplingParams) -> ParsedLine:
    """Parse one JSONL line.

    Raises:
        UserError: the line is not a JSON object, or has a field that is unknown, out of bounds or not supported.
    """
    kind = BatchLine if _is_batch(line) else SimpleLine
    parsed = decode_json(line, kind)
    if isinstance(parsed, SimpleLine):
        return _simple(parsed, defaults)
    if parsed.method != "POST":
        raise UserError(f"method {parsed.method!r:.40} is not supported; use POST")
    pooled: dict[str, EmbeddingBody | ScoreRequest] = {}
    if parsed.url == COMPLETIONS_URL:
        body = read_completion(decode_json(parsed.body, CompletionBody), defaults)
        if len(body.prompts) != 1:
            raise UserError(f"a line may have one prompt, not {len(body.prompts)}; put each prompt on its own line")
    elif parsed.url == CHAT_URL:
        body = read_chat(decode_json(parsed.body, ChatBody), defaults)
    elif parsed.url == EMBEDDINGS_URL:
        pooled = {"embedding": (body := decode_json(parsed.body, EmbeddingBody))}
    elif parsed.url in SCORE_BODIES:
        pooled = {"scoring": (body := decode_json(parsed.body, SCORE_BODIES[parsed.url]))}
    else:
        urls = f"{COMPLETIONS_URL}, {CHAT_URL}, {EMBEDDINGS_URL}, /v1/score, /v1/rerank or /classify"
        raise UserError(f"url {parsed.url!r:.60} is not supported; use {urls}")
    if pooled:
        own = GenerationInput(prompts=[], sampling=SamplingParams(), model=body.model, user=body.user or "")
        return ParsedLine(**vars(own), custom_id=parsed.custom_id, url=parsed.url, **pooled)
    if body.stream:
        raise UserError("stream=True is not supported in a batch; leave it out")
    return ParsedLine(**vars(body), custom_id=parsed.custom_id, url=parsed.url)


def read_ids(line: bytes) -> tuple[str | None, str | int | None]:
    """Read (``custom_id``, ``id``) of a line that may be invalid otherwise, for its error record: batch lines have a ``custom_id``,
    simple lines an ``id``. None for a missing id."""
    try:
        probe = msgspec.json.decode(line, type=_Ids)
        return _convert(probe.custom_id, str), _convert(probe.id, str | int)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, None


def _convert(raw: msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _simple(line: SimpleLine, defaults: SamplingParams) -> ParsedLine:
    return ParsedLine(
        sampling=line.params(defaults),
        prompts=[_prompt(line)],
        id=line.id,
        max_tokens_field="" if line.max_tokens is None else "max_tokens",
        echo=bool(line.echo),
        priority=line.priority or 0,
        user=line.user or "",
        cache_salt=line.cache_salt or "",
    )


def _prompt(line: SimpleLine) -> Prompt:
    given = {name: value for name in PROMPT_KEYS if (value := getattr(line, name)) is not None}
    key = only_key(given)
    template_use = TemplateUse(
        chat_template_kwargs=line.chat_template_kwargs or None, reasoning_effort=line.reasoning_effort
    )
    check_template_use(template_use, key)
    if key == "messages":
        return ChatPrompt([message.as_dict() for message in line.messages], template_use=template_use)
    return TextPrompt(line.prompt) if key == "prompt" else TokensPrompt(line.prompt_token_ids)


def _is_batch(line: bytes) -> bool:
    try:
        probe = msgspec.json.decode(line, type=BatchProbe)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the decoding of the whole line reports the error
    return bool(bytes(probe.custom_id) or bytes(probe.body))
