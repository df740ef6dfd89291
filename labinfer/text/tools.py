"""ToolUse: the tools that a request offers to the model, and which of them the model must call.

Names and meanings are OpenAI's (API reference, "Create chat completion": ``tools``, ``tool_choice``,
``parallel_tool_calls``, and ``tool_calls`` of messages).
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.json_depth import MAX_DEPTH, exceeds_max_depth
from labinfer.text.json_schema import MAX_SCHEMA_BYTES, fit_schema, json_type

MAX_TOOLS = 1024
MAX_FORCED_CALLS = 8
"""Maximum number of tool calls in an answer that a grammar forces to consist of tool calls."""

FunctionName = Annotated[
    str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$(?!\n)")
]  # in Python, $ also matches before a final line feed
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options to write JSON as ``json.dumps`` does: models were trained on tool calls that are written so."""


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the object with all arguments; None for a function without parameters."""
    strict: bool | None = None
    """Whether a request that forces a call of this function is refused if a grammar cannot fully enforce the schema."""


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(
    msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True
):
    """Tool choice that names a subset of the tools. All other tools are ignored."""

    allowed_tools: AllowedTools


ToolList = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]
FunctionList = Annotated[list[Function], msgspec.Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice
FunctionChoice = Literal["none", "auto"] | NamedFunction


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any]
    """Arguments of the call: JSON text (OpenAI's form), or an object (the form of Hugging Face's chat templates)."""


class PastCall(msgspec.Struct, frozen=True):
    """A tool call in an earlier message of the assistant; unknown keys are dropped."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"

    def as_dict(self) -> dict[str, Any]:
        """The call in the form that chat templates take, with an object as arguments. Arguments that are not the text of a JSON
        object stay text; empty text becomes an empty object."""
        function = {"name": self.function.name, "arguments": _read_arguments(self.function.arguments)}
        return ({} if self.id is None else {"id": self.id}) | {"type": self.type, "function": function}


class ToolUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a request that concern tools.

    Raises:
        UserError: the fields are inconsistent, or the parameters of a tool are not the schema of an object.
    """

    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    """Which tools the model calls: none with ``none``; those that it chooses with ``auto`` (the default); one or more with
    ``required``; or exactly the tool that it names."""
    parallel_tool_calls: bool | None = None
    """False if an answer may have at most one call."""
    functions: FunctionList | None = None
    function_call: FunctionChoice | None = None
    """Deprecated form of ``tool_choice``, for use with ``functions`` (the deprecated form of ``tools``). It allows one
    call in an answer."""

    def __post_init__(self) -> None:
        if self.has_functions:
            self._read_functions()
        if isinstance(self.tool_choice, AllowedToolsChoice):
            self._read_allowed(self.tool_choice.allowed_tools)
        tools = self.tools or []
        names = [tool.function.name for tool in tools]
        if not tools and self.tool_choice not in (None, "none", "auto"):
            raise UserError(f"tool_choice {_describe_choice(self.tool_choice)} needs tools to choose from")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise UserError(
                f"tool_choice {_describe_choice(self.tool_choice)} is not in tools: {', '.join(names):.200}"
            )
        for name, count in Counter(names).items():
            if count > 1:
                raise UserError(f"tools has {count} functions called {name!r}; their names must differ")
        for tool in tools:
            _check_parameters(tool.function)

    def _read_functions(self) -> None:
        if self.tools or self.tool_choice not in (None, "none", "auto"):
            raise UserError(
                "functions and function_call are deprecated forms of tools and tool_choice; use only tools and "
                "tool_choice"
            )
        choice: ToolChoice | None = None
        if isinstance(self.function_call, NamedFunction):
            choice = NamedTool(self.function_call)
        elif self.function_call is not None:
            choice = self.function_call
        tools = [Tool("function", function) for function in self.functions or []]
        for name, value in (("tools", tools), ("tool_choice", choice), ("parallel_tool_calls", False)):
            msgspec.structs.force_setattr(self, name, value)

    def _read_allowed(self, allowed: AllowedTools) -> None:
        names = [tool.function.name for tool in self.tools or []]
        allowed_names = {tool.function.name for tool in allowed.tools}
        if missing := sorted(allowed_names.difference(names)):
            raise UserError(f"tool_choice {missing[0][:64]!r} is not in tools: {', '.join(names):.200}")
        tools = [tool for tool in self.tools or [] if tool.function.name in allowed_names]
        msgspec.structs.force_setattr(self, "tools", tools)
        msgspec.structs.force_setattr(self, "tool_choice", allowed.mode)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ToolUse:
        """Take the fields that concern tools out of ``fields``; all other fields are ignored.

        Raises:
            UserError: a field is invalid.
        """
        given = {name: fields[name] for name in cls.__struct_fields__ if fields.get(name) is not None}
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise UserError(str(error)) from None
        except RecursionError:
            raise UserError("tools are nested too deeply") from None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools in the form that chat templates take; empty if ``tool_choice`` forbids calls."""
        if self.tool_choice == "none":
            return []
        offered = []
        for tool in self.tools or []:
            function = msgspec.to_builtins(tool.function)
            function.pop("strict", None)  # strict concerns the grammar, not the model
            offered.append({"type": tool.type, "function": function})
        return offered

    @property
    def has_functions(self) -> bool:
        """Whether the request uses the deprecated fields. If so, calls in its answer have the deprecated form, too."""
        return self.functions is not None or self.function_call is not None

    @property
    def is_forced(self) -> bool:
        """Whether ``tool_choice`` forces a tool call."""
        return isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required"

    @property
    def is_parallel(self) -> bool:
        """Whether an answer may have several calls."""
        return self.parallel_tool_calls is not False

    def check_schemas(self) -> list[str]:
        """Check the schemas of tools whose calls are forced. Returns warnings about parts of the schemas that a grammar cannot
        enforce.

        Raises:
            UserError: a function is strict and no grammar can enforce its schema, or the schemas together are too long.
        """
        left_out: list[str] = []
        functions = self.forced_functions[0] if self.is_forced else []
        num_bytes = sum(len(msgspec.json.encode(function.parameters)) for function in functions)
        if num_bytes > MAX_SCHEMA_BYTES:
            raise UserError(
                f"tools: the parameters of all callable functions have {num_bytes} bytes, more than the limit of "
                f'{MAX_SCHEMA_BYTES} for a forced call; name one function in tool_choice, or use "auto"'
            )
        for function in functions:
            parameters_schema(function, left_out)
        return left_out

    @property
    def forced_functions(self) -> tuple[list[Function], bool]:
        """The functions of which the model must call at least one, and whether it may make several calls."""
        functions = [tool.function for tool in self.tools or []]
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function.name == self.tool_choice.function.name], False
        return functions, self.is_parallel


def parameters_schema(function: Function, left_out: list[str] | None = None) -> dict[str, Any]:
    """Schema of a function's arguments, reduced to what a grammar can enforce, with llguidance's options.

    Args:
        left_out: list to which a warning is added if parts of the schema are left out.

    Raises:
        UserError: the function is strict, and no grammar can enforce its schema.
    """
    schema = NO_PARAMETERS if function.parameters is None else function.parameters | {"type": "object"}
    schema = fit_schema(schema, f"tools: parameters of {function.name!r}", bool(function.strict), left_out)
    return schema | {"x-guidance": schema.get("x-guidance", {}) | COMPACT}


def _read_arguments(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        read = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _describe_choice(choice: ToolChoice) -> str:
    return repr(choice.function.name if isinstance(choice, NamedTool) else choice)[:100]


def _check_parameters(function: Function) -> None:
    if function.parameters is None:
        return
    kind = function.parameters.get("type") or "object"
    if not isinstance(kind, str) or json_type(kind) != "object":
        raise UserError(f'parameters of {function.name!r} must be a schema of type "object", not {kind!r:.60}')
    required = function.parameters.get("required") or []
    if not isinstance(required, list):
        raise UserError(
            f"required in the parameters of {function.name!r} must be a list of names, not {required!r:.60}"
        )
    if exceeds_max_depth(function.parameters):
        raise UserError(f"parameters of {function.name!r} are nested more than {MAX_DEPTH} levels deep; flatten them")
