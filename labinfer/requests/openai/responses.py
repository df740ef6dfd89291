"""OpenAI's response objects (API reference, "Responses"), returned by ``/v1/responses``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from labinfer.base.sampling_params import SamplingParams
from labinfer.requests.openai.api_object import ApiObject, Count, ListPage, Usage
from labinfer.requests.openai.response_body import ResponseBody

RESPONSE_PREFIX = "resp_"
"""Prefix of the ids of responses."""
Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseLogprobTop(ApiObject):
    """Logprob of a token that was an alternative to a generated token."""

    token: str
    logprob: float
    bytes: list[int]


class ResponseLogprob(ApiObject):
    """Logprob of a generated token, and of the most likely alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ResponseLogprobTop]


class OutputText(ApiObject, tag_field="type", tag="output_text"):
    """Text of a message; ``annotations`` is always empty."""

    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ResponseLogprob] = []


class ReasoningText(ApiObject, tag_field="type", tag="reasoning_text"):
    """Text of a reasoning item."""

    text: str


class OutputMessage(ApiObject, tag_field="type", tag="message"):
    """Output item: a message of the model."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(ApiObject, tag_field="type", tag="reasoning"):
    """Output item: reasoning of the model, in full and without a summary."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[dict[str, Any]] = []


class OutputCall(ApiObject, tag_field="type", tag="function_call", kw_only=True):
    """Output item: a function call; the arguments are JSON in a string."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(ApiObject):
    """Details of ``ResponseUsage.input_tokens``: number of prefix-cache hits. The number of tokens written to the cache is not
    counted, and always 0."""

    cached_tokens: Count
    cache_write_tokens: Count = 0


class OutputDetails(ApiObject):
    """Details of ``ResponseUsage.output_tokens``: number of reasoning tokens, including delimiters."""

    reasoning_tokens: Count


class ResponseUsage(ApiObject):
    """Token counts of a response."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class IncompleteDetails(ApiObject):
    """Reason why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(ApiObject):
    """Reason why a response failed in mid-stream."""

    code: Literal["server_error"]
    message: str


class Response(ApiObject, kw_only=True):
    """Response of ``/v1/responses``: the output items, and the fields of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: Count
    completed_at: Count | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: Count | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseDeleted(ApiObject):
    """Confirmation of a deleted response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(ListPage, kw_only=True):
    """A page of the list of a response's input items."""

    data: list[dict[str, Any]]


class InputTokens(ApiObject):
    """Response of ``/v1/responses/input_tokens``: length of a prompt in tokens."""

    input_tokens: Count
    object: Literal["response.input_tokens"] = "response.input_tokens"


def new_response(id: str, created: int, model: str, body: ResponseBody, sampling: SamplingParams) -> Response:
    """Make a response to ``body`` that has no output yet."""
    reasoning, text = body.reasoning, body.text
    form = msgspec.to_builtins(text.format) if text and text.format else {"type": "text"}
    return Response(
        id=id,
        created_at=created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": reasoning and reasoning.effort, "summary": None},
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=sampling.temperature,
        text={"format": form} | ({"verbosity": text.verbosity} if text and text.verbosity else {}),
        tool_choice=msgspec.to_builtins(body.tool_choice) or "auto",
        tools=[tool.as_answer() for tool in body.tools or []],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        user=body.user,
    )


def response_usage(usage: Usage) -> ResponseUsage:
    """Convert token counts to the fields of the Responses API."""
    reasoning = usage.completion_tokens_details.reasoning_tokens
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputDetails(reasoning),
        usage.total_tokens,
    )
