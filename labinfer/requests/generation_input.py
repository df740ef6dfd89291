"""GenerationInput: what an HTTP body or a JSONL line asks for, validated; read_completion and read_chat: make it from OpenAI's
bodies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import OTHER_NAMES, SamplingParams
from labinfer.requests.prompts import Prompt
from labinfer.requests.protocol import (
    MAX_INPUTS,
    NEUTRAL_VALUES,
    ChatBody,
    CompletionBody,
    OpenAIBody,
    StreamOptions,
    check_max_tokens,
    typed_prompts,
)
from labinfer.text.tools import ToolUse

REQUEST_FIELDS = ("priority", "user", "cache_salt", "pooling", "form_field", "max_tokens_field")


@dataclass(frozen=True, kw_only=True)
class GenerationInput:
    """Input of a generation: prompts, sampling parameters, and what the response shall contain."""

    prompts: list[Prompt]
    sampling: SamplingParams
    model: str | None = None
    echo: bool = False
    prompt_alone: bool = False
    """Whether the response has the prompt and no generated text (``max_tokens=0`` with ``echo``). The model generates one token,
    which is dropped, as in vLLM."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tool_use: ToolUse = ToolUse()
    include_reasoning: bool = True
    """Whether the response includes the reasoning."""
    return_drafted: bool = False
    """Whether the response lists the tokens of each answer, each with a flag that says whether it was an accepted draft token."""
    warnings: tuple[str, ...] = ()
    """Warnings for the client about ignored fields, and about ignored keywords of schemas."""
    priority: int = 0
    user: str = ""
    cache_salt: str = ""
    pooling: str = ""
    form_field: str = "structured_outputs"
    max_tokens_field: str = ""

    @property
    def prompt(self) -> Prompt:
        """The prompt of this input, which must have exactly one prompt."""
        (prompt,) = self.prompts
        return prompt

    @property
    def request_fields(self) -> dict[str, Any]:
        """Fields that every ``Request`` of this input gets, such as its user and cache salt."""
        return {name: getattr(self, name) for name in REQUEST_FIELDS}


def read_completion(body: CompletionBody, defaults: SamplingParams) -> GenerationInput:
    """Convert the body of a completion request; omitted sampling fields come from ``defaults``.

    Raises:
        UserError: a field is out of bounds, or its value is not supported.
    """
    logprobs = None if body.logprobs is False else body.logprobs
    if body.echo and logprobs is not None and body.prompt_logprobs is None:
        body = msgspec.structs.replace(body, prompt_logprobs=logprobs)  # OpenAI's echo includes the prompt's logprobs
    return _read(body, typed_prompts("prompt", body.prompt), logprobs, ToolUse(), defaults)


def read_chat(body: ChatBody, defaults: SamplingParams) -> GenerationInput:
    """Convert the body of a chat request; omitted sampling fields come from ``defaults``.

    Raises:
        UserError: a field is out of bounds, or its value is not supported.
    """
    if body.echo:
        raise UserError("echo is for completions; chat completions do not echo the prompt")
    parsed = _read(body, [body.prompt()], body.count_logprobs(), body.tool_use(), defaults)
    return replace(
        parsed, include_reasoning=body.include_reasoning is not False, return_drafted=bool(body.return_drafted)
    )


def _check_neutral(body: OpenAIBody) -> None:
    """Check that each unsupported field of ``body`` is null or has one of its ``NEUTRAL_VALUES``, which have no effect.

    Raises:
        UserError: an unsupported field has another value.
    """
    for name in body.__struct_fields__:
        if name not in NEUTRAL_VALUES or name in body.supported:
            continue
        value = getattr(body, name)
        is_neutral = any(
            value == neutral and type(value) is type(neutral) for neutral in NEUTRAL_VALUES[name]
        )  # 1 == True in Python, but true is not a value of NEUTRAL_VALUES
        if value is not None and not is_neutral:
            instead = f"use {OTHER_NAMES[name]}" if name in OTHER_NAMES else "leave it out"
            raise UserError(f"{name}={value!r:.60} is not supported; {instead}")


def _read(
    body: OpenAIBody, prompts: list[Prompt], logprobs: Any, tool_use: ToolUse, defaults: SamplingParams
) -> GenerationInput:
    _check_neutral(body)
    warnings = tool_use.check_schemas()
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise UserError("stream_options needs stream: true; leave it out")
    max_tokens, max_tokens_field = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, max_tokens_field = body.max_tokens, "max_tokens" if body.max_tokens is not None else ""
    elif body.max_tokens is not None:
        check_max_tokens("max_tokens", body.max_tokens)  # checked although max_completion_tokens takes precedence
    prompt_alone, has_format = bool(body.echo) and max_tokens == 0, body.structured_outputs is None
    if max_tokens is not None and not prompt_alone:
        check_max_tokens(max_tokens_field, max_tokens)
    body = msgspec.structs.replace(
        body,
        max_tokens=1 if prompt_alone else max_tokens,
        logprobs=logprobs,
        structured_outputs=body.answer_form(warnings),
    )
    sampling = body.params(defaults)
    num_answers = max(sampling.num_choices, sampling.num_beams)
    if len(prompts) * num_answers > MAX_INPUTS:
        raise UserError(
            f"prompt: {num_answers} outputs for each of {len(prompts)} prompts exceed the limit of {MAX_INPUTS} "
            "per request; send several requests"
        )
    return GenerationInput(
        prompts=prompts,
        sampling=sampling,
        model=body.model,
        echo=bool(body.echo),
        prompt_alone=prompt_alone,
        priority=body.priority or 0,
        user=body.user or "",
        cache_salt=body.cache_salt or "",
        stream=bool(body.stream),
        include_usage=options.wants_usage,
        continuous_usage=options.wants_usage and bool(options.continuous_usage_stats),
        tool_use=tool_use,
        form_field="response_format" if has_format else "structured_outputs",
        max_tokens_field="" if prompt_alone else max_tokens_field,
        warnings=tuple(warnings),
    )
