"""Items of conversations in OpenAI's Responses API (API reference, "Responses"), and their conversion to chat template messages."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from labinfer.base.errors import UserError
from labinfer.text.messages import MAX_MESSAGES, MessageBuilder
from labinfer.text.tools import CalledFunction, PastCall

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
ITEM_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Maps each supported type of item to the prefix of its ids, except ``REFERENCE``, as a reference has the id of another item."""
REFERENCE = "item_reference"


def _kinds(*names: str) -> Any:
    """A string type whose JSON schema enumerates ``names``. Decoding accepts other values, which the struct refuses with a better
    error message."""
    return Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(names)})]


class ContentPart(msgspec.Struct, kw_only=True):
    """Content part of an item; unknown keys are ignored."""

    type: _kinds(*TEXT_PARTS)
    text: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        if self.type not in TEXT_PARTS:
            raise UserError(
                f"content parts of type {self.type!r:.60} are not supported: models read text only; leave it out"
            )
        if self.text is None and self.refusal is None:
            raise UserError(f"a part of type {self.type!r} needs a text")


Parts = Annotated[list[ContentPart], msgspec.Meta(max_length=MAX_MESSAGES)]
Content = str | Parts


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Item of a conversation: a message, a function call, the output of a function, reasoning, or a reference to an item of a
    stored response. Unknown keys are ignored."""

    type: _kinds(*ITEM_PREFIXES, REFERENCE) | None = None
    """Type of the item. None means a message, or a reference, which has only an id."""
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: Parts | None = None

    def __post_init__(self) -> None:
        self.type = self.type or (REFERENCE if self.role is None else "message")
        needs = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            REFERENCE: ("id",),
            "reasoning": (),
        }
        if self.type not in needs:
            raise UserError(f"items of type {self.type!r:.60} are not supported; leave it out")
        missing = [name for name in needs[self.type] if getattr(self, name) is None]
        if missing:
            raise UserError(f"an item of type {self.type!r} needs {' and '.join(missing)}")

    @property
    def is_reference(self) -> bool:
        """Whether the item is a reference to an item of a stored response."""
        return self.type == REFERENCE

    @property
    def reasoning(self) -> str:
        """Text of this item, which is a reasoning item."""
        return _text(self.content or self.summary or "")

    def as_stored(self) -> dict[str, Any]:
        """The item in the format of ``input_items``, with an id and a list of content parts."""
        fields: dict[str, Any] = {"id": self.id or new_id(self.type), "type": self.type}
        if self.type == "reasoning":
            parts = {name: getattr(self, name) or [] for name in ("summary", "content")}
            kinds = {"summary": "summary_text", "content": "reasoning_text"}
            return fields | {name: [_part(kinds[name], _text(part))] if part else [] for name, part in parts.items()}
        fields["status"] = "completed"
        if self.type == "function_call":
            return fields | {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        if self.type == "function_call_output":
            return fields | {"call_id": self.call_id, "output": _text(self.output)}
        if self.role == "assistant":
            part = _part("output_text", _text(self.content)) | {"annotations": []}
        else:
            part = _part("input_text", _text(self.content))
        return fields | {"role": self.role, "content": [part]}


def new_id(kind: str) -> str:
    """Make a random id for an item of the type ``kind``, with the prefix in ``ITEM_PREFIXES``."""
    return f"{ITEM_PREFIXES[kind]}_{secrets.token_hex(16)}"


def as_messages(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Convert items to chat template messages. Consecutive reasoning, text and function calls of the assistant become
    one message. ``instructions`` and leading system messages also become one message, as many templates accept only
    one.

    Args:
        items: items without references.
    """
    messages = [MessageBuilder("system", instructions)] if instructions else []
    for item in items:
        last = messages[-1] if messages else None
        if item.type == "function_call_output":
            messages.append(MessageBuilder("tool", _text(item.output), item.call_id))
        elif item.type == "reasoning" and not item.reasoning:
            continue  # clients may send a reasoning item without its text
        elif item.type != "message" or item.role == "assistant":
            _add_to_turn(messages, item)
        elif item.role in ("system", "developer") and len(messages) == 1 and last.role == "system":
            last.add_text(_text(item.content))
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append(MessageBuilder(role, _text(item.content)))
    return [message.as_dict() for message in messages]


def _add_to_turn(messages: list[MessageBuilder], item: Item) -> None:
    """Add ``item`` (reasoning, text or a function call of the assistant) to the last message. If that would break the order in a
    message (reasoning, text, calls), a new message begins."""
    turn = messages[-1] if messages and messages[-1].role == "assistant" else None
    has_more = turn is not None and (turn.calls or (item.type == "reasoning" and turn.has_text))
    if turn is None or (item.type != "function_call" and has_more):
        turn = MessageBuilder("assistant")
        messages.append(turn)
    if item.type == "reasoning":
        turn.add_reasoning(item.reasoning)
    elif item.type == "function_call":
        turn.calls.append(PastCall(CalledFunction(item.name, item.arguments), item.call_id))
    else:
        turn.add_text(_text(item.content))


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text or part.refusal or "" for part in content)


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}
