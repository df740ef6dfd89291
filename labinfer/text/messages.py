"""Message: one message of a conversation, as requests contain it. Names and meanings are OpenAI's (API reference, "Create chat
completion")."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from labinfer.base.errors import UserError
from labinfer.text.tools import CalledFunction, PastCall

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
"""Roles of messages. ``function`` is OpenAI's deprecated role for the result of a function call (requests with ``functions``)."""
Ending = Literal["before answer", "behind message", "in message"]
"""Where the text of a conversation ends: where the assistant's answer begins, after the last message, or inside the last
message."""
TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
"""Roles that have another name in chat templates → the name."""

PARAGRAPHS = "\n\n"
"""Separator between several texts of a request that one message of the chat template gets."""
MAX_MESSAGES = 1 << 14
"""Maximum number of messages of a conversation, of parts of a message, and of tool calls of a message."""


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Text part of a message."""

    text: str
    cache_control: Any = None
    """Key that some clients send (a hint for Anthropic's prefix cache). Accepted and ignored, as the prefix cache here needs no
    hints."""


class _UnreadPart(msgspec.Struct, tag_field="type"):
    def __post_init__(self) -> None:
        kind = self.__struct_config__.tag
        raise UserError(f"content parts of type {kind!r} are not supported: models read text only; leave it out")


class ImagePart(_UnreadPart, tag="image_url"):
    """Image part of a message. A request with one is refused, as only text is supported."""


class AudioPart(_UnreadPart, tag="input_audio"):
    """Audio part of a message. A request with one is refused, as only text is supported."""


class FilePart(_UnreadPart, tag="file"):
    """File part of a message. A request with one is refused, as only text is supported."""


UNREAD_PARTS = (ImagePart, AudioPart, FilePart)
Part = TextPart | ImagePart | AudioPart | FilePart


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message to the form that chat templates take: text parts are joined, and the arguments of tool calls become
    objects. All other keys are kept, as templates may use them.

    Raises:
        UserError: a part of the content is invalid or is not text, or a tool call is invalid.
    """
    content, calls, changes = message.get("content"), message.get("tool_calls"), {}
    try:
        if isinstance(content, list):
            changes["content"] = "".join(part.text for part in msgspec.convert(content, list[Part]))
        if calls:
            changes["content"] = changes.get("content", content)
            changes["tool_calls"] = [call.as_dict() for call in msgspec.convert(calls, list[PastCall])]
    except msgspec.ValidationError as error:
        raise UserError(f"invalid message: {error}") from None
    return message | changes


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A chat message; unknown keys are dropped."""

    role: Role
    content: str | Annotated[list[Part], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[PastCall], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    """Tool calls of an assistant's message, a message with tool calls may have null content."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Older name of ``reasoning``: the reasoning in an assistant's message."""
    tool_call_id: str | None = None
    """Id of the tool call that a message of role ``tool`` answers."""
    function_call: CalledFunction | None = None
    """Function call of an assistant's message, in the form of OpenAI's deprecated field ``function_call``."""

    def as_dict(self) -> dict[str, Any]:
        """The message in the form that chat templates take."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = TEMPLATE_ROLES.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": content or ""}
        if self.name:
            message["name"] = self.name
        calls = self.tool_calls or ([PastCall(self.function_call)] if self.function_call else [])
        if calls:
            message["content"] = content
            message["tool_calls"] = [call.as_dict() for call in calls]
        if reasoning := self.reasoning or self.reasoning_content:
            message["reasoning_content"] = reasoning
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class MessageBuilder:
    """Builds a message from several texts. If the content is empty, the first added text becomes the content.

    Args:
        role: name of the role in chat templates.
        text: first part of the content; None for no content.
        tool_call_id: id of the tool call that a message of role ``tool`` answers.
    """

    def __init__(self, role: str, text: str | None = None, tool_call_id: str | None = None):
        self.role, self._tool_call_id = role, tool_call_id
        self.calls: list[PastCall] = []
        self._texts = [] if text is None else [text]
        self._reasoning: list[str] = []

    @property
    def has_text(self) -> bool:
        """Whether the message's content is not empty."""
        return bool(self._texts) and self._texts != [""]

    def add_text(self, text: str) -> None:
        """Append ``text`` to the content, as a new paragraph."""
        _add_paragraph(self._texts, text)

    def add_reasoning(self, text: str) -> None:
        """Append ``text`` to the reasoning, as a new paragraph."""
        _add_paragraph(self._reasoning, text)

    def as_dict(self) -> dict[str, Any]:
        """The message in the form that chat templates take."""
        message = Message(
            role=self.role,
            content=PARAGRAPHS.join(self._texts) if self._texts else None,
            reasoning=PARAGRAPHS.join(self._reasoning) or None,
            tool_calls=self.calls or None,
            tool_call_id=self._tool_call_id,
        )
        return message.as_dict()


def _add_paragraph(texts: list[str], text: str) -> None:
    if texts == [""]:
        texts.clear()
    texts.append(text)


Messages = Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
