"""``/tokenize`` and ``/detokenize``, with vLLM's bodies."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from labinfer.base.errors import UserError
from labinfer.requests.openai.api_object import ApiObject, Count
from labinfer.requests.prompts import TemplateKwargs, TemplateUse
from labinfer.requests.protocol import TokenIds
from labinfer.server.gateway.endpoint import BODY_ERRORS, endpoint
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.refusals import checked
from labinfer.server.gateway.service import Model
from labinfer.text.messages import Messages
from labinfer.text.tokenizing import PromptText
from labinfer.text.tools import ToolList, ToolUse


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either a text (``prompt``) or a conversation (``messages``)."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: ToolList | None = None
    """Tools that the chat template adds to ``messages``, as in a chat request."""
    add_special_tokens: bool | None = True
    """Whether to add BOS and similar tokens to ``prompt``, as the checkpoint does. The tokens of a conversation depend
    on its chat template alone."""
    return_token_strs: bool | None = None
    """Whether to return the text of each token, too."""

    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """This field and ``add_generation_prompt`` say where the text of ``messages`` ends, as in a chat request."""


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids to convert to text."""

    model: str | None = None
    tokens: TokenIds


class Tokens(ApiObject):
    """Token ids of a text or a conversation."""

    tokens: list[Count]
    count: Count
    max_model_len: Count
    token_strs: list[str] | UnsetType = UNSET
    """Text of each token, if requested."""


class Text(ApiObject):
    """Text of token ids."""

    prompt: str


@endpoint("POST", "/tokenize", body=TokenizeBody, answer=Tokens, errors=BODY_ERRORS)
async def tokenize(context: HttpContext) -> Response:
    """Tokenize a text or a conversation."""
    body = await context.read(TokenizeBody)
    model = context.service.model(body.model)
    text = await context.compute(lambda: checked(lambda: _prompt_text(body, model)))
    (token_ids,) = await model.builder.encode(context.queue_name, [text], context.num_body_bytes)

    def whole() -> Response:
        names: list[str] | UnsetType = UNSET
        if body.return_token_strs:
            names = [model.reader.tokenizer.token_text(token).token for token in token_ids]
        return context.json(Tokens(token_ids, len(token_ids), model.info.max_model_len, names))

    return await asyncio.to_thread(whole)


def _prompt_text(body: TokenizeBody, model: Model) -> PromptText:
    """Return the text to tokenize.

    Raises:
        UserError: two fields contradict each other, or there is no tokenizer.
    """
    if (body.prompt is None) == (body.messages is None):
        raise UserError("prompt or messages: give exactly one")
    if body.tools and body.messages is None:
        raise UserError("tools need messages; leave them out")
    if body.chat_template_kwargs and body.messages is None:
        raise UserError("chat_template_kwargs needs messages; leave it out")
    tokenizer = model.reader.need_tokenizer()
    if body.prompt is not None:
        tokenizer.check_length(body.prompt, model.info.max_model_len)
        return PromptText(text=body.prompt, add_special_tokens=body.add_special_tokens is not False)
    template_use = TemplateUse(
        add_generation_prompt=body.add_generation_prompt, continue_final_message=body.continue_final_message
    )
    return PromptText(
        messages=[message.as_dict() for message in body.messages],
        tools=ToolUse(tools=body.tools).offered,
        template_kwargs=body.chat_template_kwargs,
        ending=template_use.ending,
    )


@endpoint("POST", "/detokenize", body=DetokenizeBody, answer=Text, errors=BODY_ERRORS)
async def detokenize(context: HttpContext) -> Response:
    """Convert token ids to text."""
    body = await context.read(DetokenizeBody)
    model = context.service.model(body.model)

    def decode() -> str:
        if (longest := model.info.max_model_len) < len(body.tokens):
            raise UserError(f"tokens: {len(body.tokens)} exceed this model's context length of {longest}; send fewer")
        width = model.info.vocab_size
        if (largest := max(body.tokens, default=0)) >= width:
            raise UserError(f"tokens: token id {largest} is outside the vocabulary of {width} tokens")
        return model.reader.need_tokenizer().decode(body.tokens)

    return context.json(Text(await asyncio.to_thread(checked, decode)))
