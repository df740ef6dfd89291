"""``/tokenize`` and ``/detokenize``, with vLLM's bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from labinfer.errors import UserError
from labinfer.protocol import Messages, TokenId
from labinfer.server.call import Call
from labinfer.server.generating import checked
from labinfer.text.tools import ToolList, ToolUse


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text or a conversation, one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: ToolList | None = None
    """Beside messages, as in a chat request."""
    add_special_tokens: bool = True
    """Whether a text gets what the checkpoint puts before every text; a conversation has what its template says."""
    return_token_strs: bool = False
    """Also what each token reads as alone."""


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]


async def tokenize(call: Call) -> Response:
    """``POST /tokenize``."""
    body = await call.read(TokenizeBody)
    model = call.service.model(body.model)

    def encode() -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise UserError("prompt or messages: give one of the two")
        if body.tools and body.messages is None:
            raise UserError("tools go with messages; leave them out")
        tokenizer = model.reader.need_tokenizer()
        if body.prompt is not None:
            return tokenizer.encode(body.prompt, body.add_special_tokens)
        messages = [message.as_dict() for message in body.messages]
        return tokenizer.encode_chat(messages, ToolUse(tools=body.tools).offered)

    token_ids = await asyncio.to_thread(checked, encode)
    answer: dict[str, Any] = {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": model.info.max_model_len,
    }
    if body.return_token_strs:
        answer["token_strs"] = [model.reader.tokenizer.decode([token]) for token in token_ids]
    return call.json(answer)


async def detokenize(call: Call) -> Response:
    """``POST /detokenize``."""
    body = await call.read(DetokenizeBody)
    model = call.service.model(body.model)

    def decode() -> str:
        width = model.info.vocab_size
        if (largest := max(body.tokens, default=0)) >= width:
            raise UserError(f"tokens: token id {largest} is outside the vocabulary of {width} ids")
        return model.reader.need_tokenizer().decode(body.tokens)

    return call.json({"prompt": await asyncio.to_thread(checked, decode)})
