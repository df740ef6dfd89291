"""Endpoints that ask a model, in the forms of OpenAI, vLLM and Anthropic, and keep what that needs: responses, files, batches."""

from __future__ import annotations

from typing import Any

from labinfer.requests.anthropic.message_body import MessageBody, PromptBody
from labinfer.requests.anthropic.messages import STREAM_EVENTS as MESSAGE_EVENTS
from labinfer.requests.anthropic.messages import AnthropicMessage, TokenCount
from labinfer.requests.openai.chat import ChatCompletion, ChatCompletionChunk
from labinfer.requests.openai.completions import TextCompletion, TextCompletionChunk
from labinfer.requests.openai.embeddings import EmbeddingList
from labinfer.requests.openai.files import Batch, BatchBody, BatchList, FileDeleted, FileForm, FileList, FileObject
from labinfer.requests.openai.response_body import CountBody, ResponseBody
from labinfer.requests.openai.response_events import STREAM_EVENTS
from labinfer.requests.openai.responses import InputTokens, ItemList, Response, ResponseDeleted
from labinfer.requests.openai.scores import PooledList, Ranking, ScoreList
from labinfer.requests.protocol import ChatBody, CompletionBody, EmbeddingBody
from labinfer.server.gateway.error_form import ANTHROPIC_ERRORS
from labinfer.server.gateway.openapi import ANYWHERE, INTEGER, STRING, Endpoint
from labinfer.server.gateway.page import ORDERS
from labinfer.server.gateway.routes import (
    batches,
    chat,
    completions,
    embeddings,
    files,
    messages,
    pooling,
    responses,
    tokenization,
)

READING = (*ANYWHERE, 404, 413, 415, 429, 503)
"""Statuses of errors of endpoints that read a body."""
GENERATING = (*READING, 408, 499)
STORED = (*ANYWHERE, 404)


def _page(most: int) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Parameters of a list that comes page by page."""
    limit = INTEGER | {"minimum": 1, "maximum": most}
    return ("limit", limit), ("order", STRING | {"enum": list(ORDERS)}), ("after", STRING)


PAGE, FILES_PAGE = _page(responses.MAX_PAGE), _page(files.MAX_PAGE)

MODEL_API = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        handler=chat.answer,
        summary="Answer a conversation.",
        body=ChatBody,
        answer=ChatCompletion,
        events=(ChatCompletionChunk,),
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/v1/completions",
        handler=completions.answer,
        summary="Continue texts.",
        body=CompletionBody,
        answer=TextCompletion,
        events=(TextCompletionChunk,),
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/v1/embeddings",
        handler=embeddings.answer,
        summary="Texts as vectors.",
        body=EmbeddingBody,
        answer=EmbeddingList,
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/pooling",
        handler=pooling.pool,
        summary="Texts as vectors, with vLLM's fields.",
        body=EmbeddingBody,
        answer=PooledList,
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/score",
        aliases=("/v1/score",),
        handler=pooling.score,
        summary="How alike pairs of texts are: the cosine of their vectors.",
        body=pooling.ScoreBody,
        answer=ScoreList,
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/rerank",
        aliases=("/v1/rerank", "/v2/rerank"),
        handler=pooling.rerank,
        summary="Documents in the order of their likeness to a query.",
        body=pooling.RerankBody,
        answer=Ranking,
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/tokenize",
        handler=tokenization.tokenize,
        summary="A text or a conversation as token ids.",
        body=tokenization.TokenizeBody,
        answer=tokenization.Tokens,
        errors=READING,
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        handler=tokenization.detokenize,
        summary="Token ids as text.",
        body=tokenization.DetokenizeBody,
        answer=tokenization.Text,
        errors=READING,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses",
        handler=responses.create,
        summary="Answer a conversation, also one that goes on from a stored response.",
        body=ResponseBody,
        answer=Response,
        events=STREAM_EVENTS,
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=responses.count,
        summary="The length of a prompt.",
        body=CountBody,
        answer=InputTokens,
        errors=READING,
    ),
    Endpoint(
        method="GET",
        path="/v1/responses/{id}",
        handler=responses.show,
        summary="A stored response of the same caller.",
        answer=Response,
        errors=STORED,
    ),
    Endpoint(
        method="DELETE",
        path="/v1/responses/{id}",
        handler=responses.delete,
        summary="Forget one.",
        answer=ResponseDeleted,
        errors=STORED,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses/{id}/cancel",
        handler=responses.cancel,
        summary="Refused: no response runs in the background.",
        answer=Response,
        errors=STORED,
    ),
    Endpoint(
        method="GET",
        path="/v1/responses/{id}/input_items",
        handler=responses.input_items,
        summary="The conversation that a stored response answers.",
        answer=ItemList,
        query=PAGE,
        errors=STORED,
    ),
    Endpoint(
        method="POST",
        path="/v1/messages",
        handler=messages.create,
        summary="Answer a conversation, in the form of Anthropic's API.",
        body=MessageBody,
        answer=AnthropicMessage,
        events=MESSAGE_EVENTS,
        errors=GENERATING,
        error_form=ANTHROPIC_ERRORS,
    ),
    Endpoint(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=messages.count,
        summary="The length of a prompt there.",
        body=PromptBody,
        answer=TokenCount,
        errors=READING,
        error_form=ANTHROPIC_ERRORS,
    ),
    Endpoint(
        method="POST",
        path="/v1/files",
        handler=files.upload,
        summary="Keep a file with the lines of a batch.",
        form=FileForm,
        answer=FileObject,
        errors=READING,
    ),
    Endpoint(
        method="GET",
        path="/v1/files",
        handler=files.list_files,
        summary="The files of the same caller.",
        answer=FileList,
        query=(*FILES_PAGE, ("purpose", STRING)),
        errors=STORED,
    ),
    Endpoint(
        method="GET",
        path="/v1/files/{id}",
        handler=files.show,
        summary="One of them.",
        answer=FileObject,
        errors=STORED,
    ),
    Endpoint(
        method="DELETE",
        path="/v1/files/{id}",
        handler=files.delete,
        summary="Remove one.",
        answer=FileDeleted,
        errors=STORED,
    ),
    Endpoint(
        method="GET",
        path="/v1/files/{id}/content",
        handler=files.content,
        summary="A file's content.",
        answer=str,
        content_type="application/octet-stream",
        errors=STORED,
    ),
    Endpoint(
        method="POST",
        path="/v1/batches",
        handler=batches.create,
        summary="Answer each line of a file.",
        body=BatchBody,
        answer=Batch,
        errors=READING,
    ),
    Endpoint(
        method="GET",
        path="/v1/batches",
        handler=batches.list_batches,
        summary="The batches of the same caller.",
        answer=BatchList,
        query=PAGE,
        errors=STORED,
    ),
    Endpoint(
        method="GET",
        path="/v1/batches/{id}",
        handler=batches.show,
        summary="One of them.",
        answer=Batch,
        errors=STORED,
    ),
    Endpoint(
        method="POST",
        path="/v1/batches/{id}/cancel",
        handler=batches.cancel,
        summary="Begin no more lines of one.",
        answer=Batch,
        errors=STORED,
    ),
)
