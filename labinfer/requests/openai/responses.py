"""OpenAI's response objects (API reference, "Responses"): what ``/v1/responses`` answers with."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from labinfer.base.sampling_params import SamplingParams
from labinfer.requests.openai.api_object import ApiObject, Count, ListPage, Usage
from labinfer.requests.openai.response_body import ResponseBody

RESPONSE_PREFIX = "resp_"
"""Ids of these objects begin with it."""
Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseLogprobTop(ApiObject):
    """Log-probability of a token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class ResponseLogprob(ApiObject):
    """Log-probability of a token that came, and of the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ResponseLogprobTop]


class OutputText(ApiObject, tag_field="type", tag="output_text"):
    """The text of a message; nothing is ever annotated."""

    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ResponseLogprob] = []


class ReasoningText(ApiObject, tag_field="type", tag="reasoning_text"):
    """The text of a thought."""

    text: str


class OutputMessage(ApiObject, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(ApiObject, tag_field="type", tag="reasoning"):
    """A thought, which is told in full and never summarised."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[dict[str, Any]] = []


class OutputCall(ApiObject, tag_field="type", tag="function_call", kw_only=True):
    """A call of a function; the arguments are JSON in a string."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(ApiObject):
    """Prompt tokens that were in the KV cache; writing to it is not counted."""

    cached_tokens: Count
    cache_write_tokens: Count = 0


class OutputDetails(ApiObject):
    """Tokens of thoughts, their marks included."""

    reasoning_tokens: Count


class ResponseUsage(ApiObject):
    """Numbers of tokens."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class IncompleteDetails(ApiObject):
    """Why a response is cut off."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(ApiObject):
    """Why a response failed in mid-stream."""

    code: Literal["server_error"]
    message: str


class Response(ApiObject, kw_only=True):
    """A response: what the request said, and what came of it."""

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
    """A response that is no longer stored."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(ListPage, kw_only=True):
    """A page of the input of a response."""

    data: list[dict[str, Any]]


class InputTokens(ApiObject):
    """Length of a prompt."""

    input_tokens: Count
    object: Literal["response.input_tokens"] = "response.input_tokens"


def new_response(id: str, created: int, model: str, body: ResponseBody, sampling: SamplingParams) -> Response:
    """The response to a body, of which nothing has come yet."""
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
    """The same numbers under the names of this API."""
    reasoning = usage.completion_tokens_details.reasoning_tokens
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputDetails(reasoning),
        usage.total_tokens,
    )
