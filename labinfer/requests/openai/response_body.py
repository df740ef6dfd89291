"""ResponseBody: the body of ``POST /v1/responses`` (OpenAI's API reference, "Create a model response"), with vLLM's additional
fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import MAX_COUNT, MAX_LOGPROBS, SamplingParams
from labinfer.requests.generation_input import GenerationInput
from labinfer.requests.openai.response_items import Item, as_messages
from labinfer.requests.prompts import ChatPrompt, ReasoningEffort, TemplateKwargs, TemplateUse
from labinfer.requests.protocol import (
    JSON_TYPES,
    JsonObjectFormat,
    Metadata,
    StreamOptions,
    TextFormat,
    check_max_tokens,
    given_sampling,
    json_form,
    sampled,
)
from labinfer.text.messages import MAX_MESSAGES
from labinfer.text.tools import MAX_TOOLS, Function, FunctionName, NamedFunction, NamedTool, Tool, ToolUse

LOGPROBS = "message.output_text.logprobs"
"""Value in the request field ``include`` that asks for logprobs."""
MAX_INCLUDES = 64


class ResponseTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call; unknown keys are ignored."""

    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["function"]})]
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.type != "function":
            raise UserError(
                f"tools of type {self.type!r:.60} are not supported: the server executes no tools; use functions"
            )
        if self.name is None:
            raise UserError("a tool of type 'function' needs a name")

    def as_tool(self) -> Tool:
        """The tool in the format of chat requests."""
        return Tool("function", Function(self.name, self.description, self.parameters, self.strict))

    def as_answer(self) -> dict[str, Any]:
        """The tool in the format of the field ``tools`` of responses."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


class NamedChoice(msgspec.Struct, tag_field="type", tag="function"):
    """Tool choice: a function that the model must call."""

    name: str


class AllowedTool(msgspec.Struct):
    """A function in the list of allowed tools."""

    type: Literal["function"]
    name: str


class ToolChoiceAllowed(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """Tool choice: a subset of the tools. The model may call a tool of the subset; with the mode ``required`` it must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], msgspec.Meta(max_length=MAX_TOOLS)]


class JsonSchemaText(msgspec.Struct, tag_field="type", tag="json_schema", kw_only=True, forbid_unknown_fields=True):
    """Output format: JSON that follows a schema. The schema's name and description do not affect the answer."""

    name: FunctionName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Output format, and length of the answer; the length has an effect if the chat template supports it."""

    format: TextFormat | JsonObjectFormat | JsonSchemaText | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct):
    """Length of the reasoning. Reasoning is returned in full, so ``summary`` has no effect; unknown keys are ignored."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class CountBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a body from which the prompt is made. They are the whole body of ``POST /v1/responses/input_tokens``."""

    input: str | Annotated[list[Item], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    """A text, or the items of a conversation. They are appended to the conversation of ``previous_response_id``."""
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[ResponseTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | ToolChoiceAllowed | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    """Only ``disabled`` is supported: a conversation longer than the context is refused, not truncated."""
    chat_template_kwargs: TemplateKwargs | None = None

    supported: ClassVar[tuple[str, ...]] = ("tools", "tool_choice")

    def items(self) -> list[Item]:
        """The field ``input`` as a list of items."""
        if isinstance(self.input, str):
            return [Item(role="user", content=self.input)]
        return self.input or []

    def prompt(self, items: list[Item]) -> ChatPrompt:
        """The conversation of ``items`` as a prompt, with the tools, if the model may call any.

        Raises:
            UserError: there are no items, or ``tool_choice`` contradicts ``tools``.
        """
        if not items and not self.instructions:
            raise UserError("input is empty; give a text, or at least one item")
        tool_use = self.tool_use()
        template_use = TemplateUse(
            chat_template_kwargs=self.chat_template_kwargs or None,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            verbosity=self.text.verbosity if self.text else None,
        )
        return ChatPrompt(
            as_messages(items, self.instructions), tool_use if tool_use.offered else ToolUse(), template_use
        )

    def tool_use(self) -> ToolUse:
        """The tools that the model may call. Tools that ``allowed_tools`` does not name are left out.

        Raises:
            UserError: ``tool_choice`` contradicts ``tools``.
        """
        tools, choice = [tool.as_tool() for tool in self.tools or []], self.tool_choice
        if isinstance(choice, ToolChoiceAllowed):
            allowed, names = {tool.name for tool in choice.tools}, {tool.function.name for tool in tools}
            if unknown := sorted(allowed - names):
                raise UserError(f"tool_choice allows {unknown[0]!r:.70}, which is not in tools")
            tools, choice = [tool for tool in tools if tool.function.name in allowed], choice.mode
        elif isinstance(choice, NamedChoice):
            choice = NamedTool(NamedFunction(choice.name))
        return ToolUse(tools=tools, tool_choice=choice, parallel_tool_calls=self.parallel_tool_calls)


MaxTokens = JSON_TYPES["max_tokens"]
EXCLUDED_SAMPLING = (
    "n",
    "best_of",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "max_tokens",
    "max_context_len",
    "skip_special_tokens",
    "logprobs",
    "prompt_logprobs",
)
"""Fields of ``SamplingParams`` that ``ResponseBody`` does not have: OpenAI's API lacks them or has other names for them."""


class ResponseBody(sampled(CountBody, *EXCLUDED_SAMPLING), kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/responses``. Fields after ``background`` are accepted and ignored."""

    max_output_tokens: MaxTokens = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str], msgspec.Meta(max_length=MAX_INCLUDES)] | None = None
    """Kinds of additional data for the response. Only ``message.output_text.logprobs`` has an effect."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    """Whether the server stores the response, so that clients can retrieve and continue it; true by default."""
    priority: Annotated[int, msgspec.Meta(ge=-MAX_COUNT, le=MAX_COUNT)] | None = None
    cache_salt: str | None = None
    user: str | None = None
    metadata: Metadata | None = None

    background: Annotated[bool | None, msgspec.Meta(extra_json_schema={"enum": [False, None]})] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    max_tool_calls: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def parse(self, items: list[Item], defaults: SamplingParams) -> GenerationInput:
        """Convert the body to a ``GenerationInput`` over ``items``; omitted sampling fields come from ``defaults``.

        Raises:
            UserError: a field is out of bounds, or its value is not supported.
        """
        if self.background:
            raise UserError(
                "background=True is not supported: a response ends when its connection closes; leave it out"
            )
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options needs stream: true; leave it out")
        prompt = self.prompt(items)
        warnings = prompt.tool_use.check_schemas()
        return GenerationInput(
            prompts=[prompt],
            sampling=self._sampling(defaults, warnings),
            model=self.model,
            priority=self.priority or 0,
            user=self.user or "",
            cache_salt=self.cache_salt or "",
            stream=bool(self.stream),
            form_field="text" if self.structured_outputs is None else "structured_outputs",
            tool_use=prompt.tool_use,
            warnings=tuple(warnings),
        )

    def _sampling(self, defaults: SamplingParams, left_out: list[str]) -> SamplingParams:
        given = given_sampling(self)
        if self.max_output_tokens is not None:
            check_max_tokens("max_output_tokens", self.max_output_tokens)
            given["max_tokens"] = self.max_output_tokens
        if LOGPROBS in (self.include or ()):
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise UserError(f"top_logprobs needs include: [{LOGPROBS!r}]")
        form = self.text.format if self.text else None
        if form is not None and not isinstance(form, TextFormat):
            if self.structured_outputs is not None:
                raise UserError("text.format and structured_outputs both constrain the output; leave one out")
            is_strict = isinstance(form, JsonSchemaText) and bool(form.strict)
            given["structured_outputs"] = json_form(form.schema, "text.format", is_strict, left_out)
        return defaults.updated(given)
