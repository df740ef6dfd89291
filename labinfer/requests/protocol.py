"""Schema of requests with all bounds of their fields, for HTTP bodies and JSONL lines.

Names and meanings of fields are those of OpenAI's API reference; fields that it lacks are vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import BIAS, MAX_COUNT, NUMBERS, TEXTS, SamplingParams
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.requests.embedding import EmbeddingModel, PromptEmbedding
from labinfer.requests.prompts import (
    TEMPLATE_KEYS,
    TOOL_KEYS,
    ChatPrompt,
    Prompt,
    ReasoningEffort,
    TemplateKwargs,
    TemplateUse,
    TextPrompt,
    TokensPrompt,
    Verbosity,
)
from labinfer.text.json_schema import fit_schema
from labinfer.text.messages import Messages
from labinfer.text.tools import FunctionChoice, FunctionList, FunctionName, ToolChoice, ToolList, ToolUse

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
EMBEDDINGS_URL = "/v1/embeddings"
MAX_INPUTS = 2048
"""Maximum number of inputs of a request, and of answers to all its inputs together. It is OpenAI's limit for embeddings."""
SAMPLING_FIELDS = tuple(field.name for field in msgspec.structs.fields(SamplingParams))

TOKEN_ID = "token id"
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT, title=TOKEN_ID)]
"""A token id. The vocabulary of the model bounds it further."""

MAX_TOKEN_IDS = 1 << 20
"""Maximum number of token ids in a prompt."""
MAX_CHOSEN_IDS = 1 << 18
"""Maximum number of entries of a list or map of token ids that controls sampling, as large as the largest vocabularies."""

Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
"""Metadata that a client stores with an object; the bounds are OpenAI's."""

NEUTRAL_VALUES: dict[str, list[Any]] = {
    "suffix": [""],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "modalities": [["text"]],
    "web_search_options": [],
    "audio": [],
    "truncate_prompt_tokens": [],
    "use_beam_search": [False],
    "return_token_ids": [False],
    "return_tokens_as_token_ids": [False],
    "chat_template": [],
    "documents": [[]],
}
"""Maps each unsupported field (first OpenAI's, then vLLM's) to the values that are accepted, because they ask for nothing. Null is
always accepted."""


def _bounded(kind: Any, **keywords: Any) -> Any:
    """Optional type ``kind`` whose JSON schema also has ``keywords``. The keywords only document bounds: ``SamplingParams`` checks
    the values, as its errors name the field."""
    return Annotated[kind | None, msgspec.Meta(extra_json_schema=keywords)]


def _number(name: str) -> Any:
    """Optional type of a numeric field of ``SamplingParams``; its JSON schema has the field's bounds."""
    kind, bounds = NUMBERS[name]
    return _bounded(kind, minimum=bounds.least, maximum=bounds.most)


def check_max_tokens(field: str, value: int) -> None:
    """Check the value of ``max_tokens`` that was given under the name ``field``.

    Raises:
        UserError: ``value`` is out of bounds; the message names ``field``.
    """
    kind, bounds = NUMBERS["max_tokens"]
    bounds.check(field, kind, value)


def _texts(name: str) -> Any:
    """Optional type for a string or a list of strings; its JSON schema has the bounds of the ``SamplingParams`` field
    ``name``."""
    short = {"minLength": 1, "maxLength": TEXTS[name].longest}
    return _bounded(str | list[str], **short, maxItems=TEXTS[name].most, items={"type": "string"} | short)


JSON_TYPES: dict[str, Any] = {name: _number(name) for name in NUMBERS} | {
    "seed": int | None,  # any integer, reduced modulo 2**63
    "stop": _texts("stop"),
    "bad_words": _texts("bad_words"),
    "logit_bias": _bounded(
        Annotated[dict[TokenId, float], msgspec.Meta(max_length=MAX_CHOSEN_IDS)],
        propertyNames={"pattern": "^(0|[1-9][0-9]{0,8})$"},
        additionalProperties={"type": "number", "minimum": BIAS.least, "maximum": BIAS.most},
    ),
    "allowed_token_ids": Annotated[list[TokenId], msgspec.Meta(max_length=MAX_CHOSEN_IDS)] | None,
    "stop_token_ids": Annotated[list[TokenId], msgspec.Meta(max_length=MAX_CHOSEN_IDS)] | None,
    "early_stopping": _bounded(bool | str, enum=[True, False, "never", None]),
    "logprobs": bool | int | None,  # a count; in OpenAI's chat bodies true or false, beside top_logprobs
}
"""Maps each field of ``SamplingParams`` that has bounds, or another type in JSON, to its type in JSON."""


def sampled(base: type[msgspec.Struct], *left_out: str) -> type[msgspec.Struct]:
    """Make a struct with the fields of ``base`` and of ``SamplingParams``, except the fields in ``left_out``. Sampling fields
    default to None."""
    kinds = get_type_hints(SamplingParams).items()
    fields = [(name, JSON_TYPES.get(name, kind | None), None) for name, kind in kinds if name not in left_out]
    return msgspec.defstruct("Sampled", fields, bases=(base,), kw_only=True)


def given_sampling(body: msgspec.Struct) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that ``body`` sets."""
    names = (name for name in SAMPLING_FIELDS if name in body.__struct_fields__)
    return {name: value for name in names if (value := getattr(body, name)) is not None}


class RequestFields(sampled(msgspec.Struct), kw_only=True):
    """Fields that every kind of request has in addition to its prompt. For ``seed`` see ``SamplingParams.updated``."""

    priority: Annotated[int, msgspec.Meta(ge=-MAX_COUNT, le=MAX_COUNT)] | None = None
    """Priority of the request with ``--scheduling-policy priority``: requests with the lowest value run first."""
    user: str | None = None
    """User id. With ``--scheduling-policy fair``, the scheduler alternates between users."""
    cache_salt: str | None = None
    """Prefix-cache salt: only requests with equal salts share cached tokens."""
    echo: bool | None = None
    """Whether the text of the answer begins with the prompt."""

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Sampling parameters of the request: values that it sets, all others from ``defaults``.

        Raises:
            UserError: a field is out of bounds.
        """
        return defaults.updated(given_sampling(self))


TokenIds = Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKEN_IDS)]
_TOKEN_IDS = {"type": "array", "minItems": 1, "maxItems": MAX_TOKEN_IDS, "items": msgspec.json.schema(TokenId)}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
_INPUT_KINDS = [
    {"type": "string", "minLength": 1},
    _SEVERAL | {"items": {"type": "string", "minLength": 1}},
    _TOKEN_IDS,
    _SEVERAL | {"items": _TOKEN_IDS},
]
"""JSON schemas of the four kinds of inputs. They are written by hand, as a msgspec union may contain only one list type."""
Inputs = Annotated[
    str | Annotated[list[str | TokenId | TokenIds], msgspec.Meta(max_length=MAX_TOKEN_IDS)],
    msgspec.Meta(extra_json_schema={"oneOf": _INPUT_KINDS}),
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Which chunks of a streamed response report the usage."""

    include_usage: bool | None = None
    """Whether the last chunk of a stream has the usage. By default it has the usage if ``continuous_usage_stats`` is true."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the usage so far. No effect if ``include_usage`` is false."""
    include_obfuscation: bool | None = None
    """Accepted and ignored: chunks are not padded to obscure the lengths of tokens."""

    @property
    def wants_usage(self) -> bool:
        """Whether any chunk has the usage."""
        return bool(self.continuous_usage_stats if self.include_usage is None else self.include_usage)


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Response format: any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Response format: a JSON object."""

    schema: dict[str, Any] | None = None
    """JSON schema that the answer must follow, as in llama.cpp and Together; None for any object."""


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema in OpenAI's wrapper. Answers always follow the schema, except keywords that no grammar can express: these are
    ignored, or an error with ``strict``."""

    name: FunctionName
    description: str | None = None
    schema: dict[str, Any] | None = None
    """JSON schema; None for any JSON object."""
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """Response format: JSON that follows a schema. Exactly one of ``json_schema`` and ``schema`` is given."""

    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None
    """JSON schema without OpenAI's wrapper, as in llama.cpp and Together."""

    def __post_init__(self) -> None:
        if (self.json_schema is None) == (self.schema is None):
            raise UserError("response_format of type json_schema needs json_schema or schema")


def json_form(schema: dict[str, Any] | None, field: str, is_strict: bool, left_out: list[str]) -> StructuredOutputs:
    """Make the constraint that answers follow a JSON ``schema``, or are any JSON object if ``schema`` is None. ``field`` is the
    request field with the schema; for the other arguments see ``fit_schema``."""
    if schema is None:
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=fit_schema(schema, field, is_strict, left_out))


class OpenAIBody(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """Fields that OpenAI's chat and completion bodies share. Fields from ``metadata`` on are ignored; fields from ``suffix`` to
    ``return_tokens_as_token_ids`` may only have ``NEUTRAL_VALUES``."""

    model: str | None = None
    """Served name of the model; None for the default model."""
    max_completion_tokens: _number("max_tokens") = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    metadata: dict | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    spaces_between_special_tokens: bool | None = None

    suffix: Any = None
    tools: Any = None
    tool_choice: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None

    def answer_form(self, left_out: list[str]) -> StructuredOutputs | None:
        """Constraint on the output of the request, from either ``response_format`` or ``structured_outputs``; None if the request
        has neither.

        Args:
            left_out: list to which a warning about ignored schema keywords is added.

        Raises:
            UserError: both fields are given, or a schema is too large or nested too deeply.
        """
        form = self.response_format
        if form is None or isinstance(form, TextFormat):
            return self.structured_outputs
        if self.structured_outputs is not None:
            raise UserError("response_format and structured_outputs both constrain the output; leave one out")
        named = form.json_schema if isinstance(form, JsonSchemaFormat) else None
        schema = form.schema if named is None else named.schema
        return json_form(schema, "response_format", named is not None and bool(named.strict), left_out)

    supported: ClassVar[tuple[str, ...]] = ()
    """Fields in ``NEUTRAL_VALUES`` that this kind of body supports; they may have any value."""


class CompletionBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/completions``."""

    prompt: Inputs
    """A text, token ids, or a list of texts or of lists of token ids."""
    max_tokens: _bounded(int, minimum=0, maximum=MAX_COUNT) = None
    """Maximum number of output tokens. With ``echo``, 0 returns only the prompt and its logprobs."""


class ChatBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/chat/completions``. The fields after ``prediction`` may only have ``NEUTRAL_VALUES``."""

    messages: Messages
    top_logprobs: _number("logprobs") = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Length of the reasoning; has an effect if the chat template supports it."""
    verbosity: Verbosity | None = None
    """Length of the answer; has an effect if the chat template supports it."""
    chat_template_kwargs: TemplateKwargs | None = None
    """Variables of the chat template, such as ``enable_thinking``."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the model continues the last message. For this field and ``add_generation_prompt`` see
    ``TemplateUse``."""
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] | None = None
    """Maximum number of reasoning tokens; see ``ChatPrompt.thinking_budget``."""
    include_reasoning: bool | None = None
    """Whether the response includes the reasoning; true by default. Does not switch reasoning off."""
    return_drafted: bool | None = None
    """Whether the response lists the answer's tokens, each with a flag that says whether it was an accepted draft token."""
    functions: FunctionList | None = None
    function_call: FunctionChoice | None = None
    """``functions`` and ``function_call`` are deprecated names of ``tools`` and ``tool_choice``, see ``ToolUse``."""

    prediction: dict | None = None
    """Text that the client expects as answer (OpenAI's predicted outputs); accepted and ignored."""
    modalities: Any = None
    web_search_options: Any = None
    audio: Any = None
    chat_template: Any = None
    documents: Any = None

    supported: ClassVar[tuple[str, ...]] = ("tools", "tool_choice")

    def prompt(self) -> ChatPrompt:
        """The conversation as a prompt, with the tools, if the model may call any.

        Raises:
            UserError: ``tool_choice`` contradicts ``tools``.
        """
        messages, tool_use = [message.as_dict() for message in self.messages], self.tool_use()
        template_use = TemplateUse(
            **{name: value for name in TEMPLATE_KEYS if (value := getattr(self, name)) not in (None, {})}
        )
        tool_use = tool_use if tool_use.offered else ToolUse()
        return ChatPrompt(messages, tool_use, template_use, self.thinking_token_budget)

    def tool_use(self) -> ToolUse:
        """Tools and tool choice of the request, as one object.

        Raises:
            UserError: ``tool_choice`` contradicts ``tools``.
        """
        return ToolUse(**{name: getattr(self, name) for name in TOOL_KEYS})

    def count_logprobs(self) -> int | None:
        """Value of ``SamplingParams.logprobs`` for ``logprobs`` (a boolean) and ``top_logprobs`` (a number) of a chat
        request.

        Raises:
            UserError: ``logprobs`` is not a boolean, or ``top_logprobs`` is given without ``logprobs`` or is out of bounds.
        """
        if type(self.logprobs) is int:
            raise UserError(f"logprobs must be true or false in a chat request, not {self.logprobs!r:.60}")
        if self.top_logprobs and not self.logprobs:
            raise UserError("top_logprobs needs logprobs: true")
        if self.top_logprobs is not None:
            kind, bounds = NUMBERS["logprobs"]
            bounds.check("top_logprobs", kind, self.top_logprobs)
        return (self.top_logprobs or 0) if self.logprobs else None


Pooling = Literal["last", "mean", "cls"]
"""Pooling method, see ``plan.POOLINGS``; by default the method in the model's files. Similarity scores need it for a model whose
files have none."""


class EmbeddingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's body of an embeddings request (API reference, "Create embeddings"), with ``pooling``."""

    input: Inputs
    """A text, token ids, or a list of texts or of lists of token ids."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Length to which vectors are cut before they are normalized; by default vectors are whole."""
    prompt_name: str | None = None
    """Name of the prompt to put before each text, of those in the model's files; by default none."""
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)] | None = None
    """Maximum number of tokens of an input, to which it is cut; -1 for the model's maximum. By default longer inputs are an error."""
    user: str | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    """Whether to scale vectors to unit length; by default as the model's files say."""
    use_activation: bool | None = None
    """vLLM's newer name of ``normalize``."""

    def __post_init__(self) -> None:
        self.normalize = self.use_activation if self.normalize is None else self.normalize
        self.encoding_format = self.encoding_format or "float"

    def prompts(self) -> list[Prompt]:
        """Inputs of the request as prompts, in order.

        Raises:
            UserError: there are no or too many inputs, one is empty, or the inputs mix texts and token ids.
        """
        return typed_prompts("input", self.input)

    def embedding(self, model: EmbeddingModel) -> PromptEmbedding:
        """The embeddings to compute.

        Raises:
            UserError: an input is invalid, or the model does not support one of the fields.
        """
        names = ("pooling", "normalize", "dimensions", "prompt_name", "truncate_prompt_tokens")
        return PromptEmbedding(model=model, given=self.prompts(), **{name: getattr(self, name) for name in names})


def typed_prompts(field: str, inputs: Any) -> list[Prompt]:
    """Convert the inputs in ``field`` of a request to prompts, in order.

    Raises:
        UserError: there are no or too many inputs, one is empty, or ``inputs`` mixes texts and token ids.
    """
    if isinstance(inputs, str) or (inputs and all(isinstance(item, int) for item in inputs)):
        inputs = [inputs]
    kinds = {type(item) for item in inputs}
    if len(kinds) > 1 or int in kinds:
        raise UserError(f"{field} mixes strings, token ids and lists; use one kind")
    if not 0 < len(inputs) <= MAX_INPUTS:
        raise UserError(f"{field} must have 1 to {MAX_INPUTS} texts or prompts, not {len(inputs)}")
    for index, item in enumerate(inputs):
        if not item:
            raise UserError(f"{field} {index} is empty; give at least one token")
    return list(map(TextPrompt if str in kinds else TokensPrompt, inputs))
