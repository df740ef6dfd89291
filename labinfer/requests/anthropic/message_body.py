"""MessageBody: the body of ``POST /v1/messages`` (Anthropic's API reference, "Messages"), and its conversion to a prompt."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import MAX_COUNT, SamplingParams
from labinfer.requests.generation_input import GenerationInput
from labinfer.requests.prompts import ChatPrompt, ReasoningEffort, TemplateUse, thinking_switches
from labinfer.requests.protocol import JSON_TYPES, given_sampling, json_form
from labinfer.text.messages import MAX_MESSAGES, PARAGRAPHS, MessageBuilder
from labinfer.text.tools import (
    MAX_TOOLS,
    CalledFunction,
    Function,
    FunctionName,
    NamedFunction,
    NamedTool,
    PastCall,
    Tool,
    ToolUse,
)

Temperature, TopP, TopK, Stop = (JSON_TYPES[name] for name in ("temperature", "top_p", "top_k", "stop"))
BLOCK_FIELDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""Maps each supported type of content block to the fields that a block must have."""
ROLES = {"thinking": "assistant", "redacted_thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}
"""Maps each type of content block that only one role's messages may have to the role."""


class ContentBlock(msgspec.Struct, kw_only=True):
    """A content block of a message; unknown keys are ignored."""

    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(BLOCK_FIELDS)})]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Blocks | None = None
    cache_control: Any = None
    """Hint for Anthropic's prefix cache, accepted and ignored: the prefix cache here needs no hints."""

    def __post_init__(self) -> None:
        if self.type not in BLOCK_FIELDS:
            raise UserError(
                f"content blocks of type {self.type!r:.60} are not supported: models read text only; leave it out"
            )
        missing = [name for name in BLOCK_FIELDS[self.type] if getattr(self, name) is None]
        if missing:
            raise UserError(f"a block of type {self.type!r} needs {' and '.join(missing)}")


Blocks = Annotated[list[ContentBlock], msgspec.Meta(max_length=MAX_MESSAGES)]


class Turn(msgspec.Struct):
    """A message of the conversation, in Anthropic's format; unknown keys are ignored."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks

    def blocks(self) -> list[ContentBlock]:
        """The content of the message as a list of blocks.

        Raises:
            UserError: a block type is not allowed in this role.
        """
        if isinstance(self.content, str):
            return [ContentBlock(type="text", text=self.content)]
        for block in self.content:
            role = ROLES.get(block.type, self.role)
            if role != self.role:
                raise UserError(
                    f"messages: a block of type {block.type!r} belongs in a message of role {role!r}, not {self.role!r}"
                )
        return self.content


class MessageTool(msgspec.Struct, kw_only=True):
    """A function that the model may call; unknown keys are ignored."""

    name: FunctionName
    type: Annotated[str | None, msgspec.Meta(extra_json_schema={"enum": ["custom", None]})] = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.type not in (None, "custom"):
            raise UserError(
                f"tools of type {self.type!r:.60} are not supported: the server executes no tools; define your own "
                "tool with an input_schema"
            )


class MessageToolChoice(msgspec.Struct, kw_only=True):
    """Tool choice: whether the model may call tools, must call a tool, or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> str | NamedTool:
        """This tool choice in the format of OpenAI's chat requests.

        Raises:
            UserError: the type is "tool", and no name is given.
        """
        if self.type != "tool":
            return {"any": "required"}.get(self.type, self.type)
        if self.name is None:
            raise UserError("tool_choice of type 'tool' needs a name")
        return NamedTool(NamedFunction(self.name))


class Thinking(msgspec.Struct, kw_only=True):
    """Field ``thinking``: whether the model reasons before its answer; unknown keys are ignored."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)] | None = None
    """Maximum tokens of reasoning; see ``ChatPrompt.thinking_budget``."""
    display: Literal["summarized", "omitted"] | None = None
    """``omitted`` leaves the reasoning out of the response; ``summarized`` and null return it in full."""


class JsonFormat(msgspec.Struct):
    """Output format: JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """Reasoning effort and output format; unknown keys are ignored."""

    effort: ReasoningEffort | None = None
    format: JsonFormat | None = None


class PromptBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a body from which the prompt is made. They are the whole body of ``POST /v1/messages/count_tokens``.
    ``cache_control`` and ``context_management`` are accepted and ignored."""

    messages: Annotated[list[Turn], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | Blocks | None = None
    tools: Annotated[list[MessageTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """Older name of ``output_config.format``."""

    cache_control: Any = None
    context_management: Any = None

    supported: ClassVar[tuple[str, ...]] = ("tools", "tool_choice")

    def prompt(self) -> ChatPrompt:
        """The conversation as a prompt, with the tools, if the model may call any.

        Raises:
            UserError: two messages contradict each other, or ``tool_choice`` contradicts ``tools``.
        """
        goes_on = self.messages[-1].role == "assistant"
        messages = [MessageBuilder("system", _joined(self.system))] if self.system else []
        for turn in self.messages:
            _add_turn(messages, turn)
        if goes_on and messages[-1].calls:
            raise UserError(
                "messages: the last message calls tools, so it cannot be continued; add a message with the tool results"
            )
        tool_use, config = self._tool_use(), self.output_config
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        template_use = TemplateUse(
            chat_template_kwargs=thinking_switches(thinks),
            continue_final_message=goes_on or None,
            reasoning_effort=config.effort if config is not None else None,
        )
        tool_use = tool_use if tool_use.offered else ToolUse()
        budget = self.thinking.budget_tokens if thinks else None
        return ChatPrompt([message.as_dict() for message in messages], tool_use, template_use, budget)

    def _tool_use(self) -> ToolUse:
        tools = [
            Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))
            for tool in self.tools or []
        ]
        if self.tool_choice is None:
            return ToolUse(tools=tools)
        parallel = False if self.tool_choice.disable_parallel_tool_use else None
        return ToolUse(tools=tools, tool_choice=self.tool_choice.choice(), parallel_tool_calls=parallel)


class MessageMetadata(msgspec.Struct):
    """Metadata of a request; unknown keys are ignored."""

    user_id: str | None = None
    """Accepted and ignored. Clients write session and device into it, so it does not identify an end user."""


class MessageBody(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/messages``. Fields after ``thread`` have no effect."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    stop_sequences: Stop = None
    logits_processors: dict[str, Any] | None = None
    """Values for logits processors of plugins, by name of the processor, as in ``SamplingParams``. Not in Anthropic's API."""
    stream: bool | None = None
    thread: Any = None
    """Stored conversation to continue. Any value is refused with the error code ``THREADS_REFUSED``, which tells clients to send
    the whole conversation."""

    diagnostics: Any = None
    metadata: MessageMetadata | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None
    mcp_servers: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None

    @property
    def shows_reasoning(self) -> bool:
        """Whether the response includes the reasoning. Clients that do not ask for reasoning expect a text block first."""
        thinking = self.thinking
        return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"

    def parse(self, defaults: SamplingParams) -> GenerationInput:
        """Convert the body to a ``GenerationInput``; omitted sampling fields come from ``defaults``.

        Raises:
            UserError: a field is out of bounds, or its value is not supported.
        """
        given = given_sampling(self)
        if self.stop_sequences is not None:
            given["stop"] = self.stop_sequences
        prompt = self.prompt()
        warnings = prompt.tool_use.check_schemas()
        form = self.output_config.format if self.output_config and self.output_config.format else self.output_format
        if form is not None:
            given["structured_outputs"] = json_form(form.schema, "output_config", False, warnings)
        return GenerationInput(
            prompts=[prompt],
            sampling=defaults.updated(given),
            model=self.model,
            stream=bool(self.stream),
            form_field="output_config",
            tool_use=prompt.tool_use,
            warnings=tuple(warnings),
        )


def _add_turn(messages: list[MessageBuilder], turn: Turn) -> None:
    """Append the message ``turn`` to ``messages``, in the format of chat templates. Each tool result becomes a message;
    texts of consecutive messages with one role are merged."""
    blocks = turn.blocks()
    if turn.role == "assistant":
        message = MessageBuilder("assistant", _joined(blocks))
        for block in blocks:
            if block.type == "tool_use":
                message.calls.append(PastCall(CalledFunction(block.name, block.input), block.id))
            elif block.type == "thinking":
                message.add_reasoning(block.thinking)
        messages.append(message)
        return
    for block in blocks:
        last = messages[-1] if messages else None
        if block.type == "tool_result":
            messages.append(MessageBuilder("tool", _joined(block.content), block.tool_use_id))
        elif last is not None and last.role == turn.role:
            last.add_text(block.text)
        else:
            messages.append(MessageBuilder(turn.role, block.text))


def _joined(content: str | list[ContentBlock] | None) -> str:
    """Texts of all text blocks of ``content``, joined by blank lines; a string is returned unchanged."""
    if content is None or isinstance(content, str):
        return content or ""
    return PARAGRAPHS.join(block.text for block in content if block.type == "text")
