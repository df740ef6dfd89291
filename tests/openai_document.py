"""OpenAI's own API as an OpenAPI document, of the types in its Python client, which are generated from its specification."""

from __future__ import annotations

from typing import Any

import pydantic
from openai.types import Completion, CreateEmbeddingResponse, Model, completion_create_params, embedding_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.shared import ErrorObject

JSON, STREAM = "application/json", "text/event-stream"
NEEDED = {"messages": {"minItems": 1}, "prompt": {"type": ["string", "array"], "minLength": 1, "minItems": 1}}


class OpenAIDocument:
    """The routes of ``ROUTES`` as OpenAI's client has them.

    Args:
        model: the only one there is.
        known: for each path, which of its fields requests may have; without it, all of OpenAI's.
    """

    def __init__(self, model: str, known: dict[str, set[str]] | None = None):
        self._model, self._known = model, known
        self._schemas: dict[str, Any] = {}

    def build(self) -> dict[str, Any]:
        chat, text, vectors = chat_create_params, completion_create_params, embedding_create_params
        paths = {
            "/v1/chat/completions": self._post(
                "/v1/chat/completions",
                [chat.CompletionCreateParamsNonStreaming, chat.CompletionCreateParamsStreaming],
                ChatCompletion,
                ChatCompletionChunk,
            ),
            "/v1/completions": self._post(
                "/v1/completions",
                [text.CompletionCreateParamsNonStreaming, text.CompletionCreateParamsStreaming],
                Completion,
                Completion,
            ),
            "/v1/embeddings": self._post("/v1/embeddings", [vectors.EmbeddingCreateParams], CreateEmbeddingResponse),
            "/v1/models": {"get": {"responses": self._responses(self._list_of(Model))}},
            "/v1/models/{model}": {
                "get": {
                    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
                    "responses": self._responses(self._schema(Model)),
                }
            },
        }
        self._allow_what_openai_sends()
        return {
            "openapi": "3.2.0",
            "info": {"title": "OpenAI", "version": "1"},
            "paths": paths,
            "components": {"schemas": self._schemas},
        }

    def _post(self, path: str, bodies: list[Any], answer: Any, chunk: Any = None) -> dict[str, Any]:
        kinds = [self._body(path, body) for body in bodies]
        body = {"required": True, "content": {JSON: {"schema": {"oneOf": kinds} if len(kinds) > 1 else kinds[0]}}}
        return {"post": {"requestBody": body, "responses": self._responses(self._schema(answer), chunk)}}

    def _body(self, path: str, kind: Any) -> dict[str, Any]:
        schema = self._schema(kind)
        properties = schema["properties"]
        properties["model"] = {"const": self._model}
        if self._known is not None:
            properties = {name: properties[name] for name in properties if name in self._known[path]}
            for name in NEEDED.keys() & properties.keys():  # an empty or no prompt leads nowhere
                properties[name] |= NEEDED[name]
            schema |= {"properties": properties, "additionalProperties": False}
        if "stream" in properties and "stream" not in schema["required"]:
            properties["stream"] = {"enum": [False, None]}
        return schema

    def _responses(self, answer: dict[str, Any], chunk: Any = None) -> dict[str, Any]:
        content: dict[str, Any] = {JSON: {"schema": answer}}
        error = {"type": "object", "properties": {"error": self._schema(ErrorObject)}, "required": ["error"]}
        if chunk is not None:
            data = {"contentMediaType": JSON, "contentSchema": {"anyOf": [self._schema(chunk), error]}}
            event = {"properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}
            content[STREAM] = {"itemSchema": event}
        return {
            "200": {"description": "", "content": content},
            "4XX": {"description": "", "content": {JSON: {"schema": error}}},
        }

    def _list_of(self, kind: Any) -> dict[str, Any]:
        properties = {"object": {"const": "list"}, "data": {"type": "array", "items": self._schema(kind)}}
        return {"type": "object", "properties": properties, "required": ["object", "data"]}

    def _schema(self, kind: Any) -> dict[str, Any]:
        """What it refers to is a component by its name and the kind's: two kinds may have a ``Choice``."""
        template = f"#/components/schemas/{kind.__module__}.{kind.__name__}.{{model}}"
        schema = pydantic.TypeAdapter(kind).json_schema(ref_template=template)
        for name, part in schema.pop("$defs", {}).items():
            self._schemas[template.format(model=name).rpartition("/")[2]] = part
        return schema

    def _allow_what_openai_sends(self) -> None:
        """Where the client's types are narrower than the API."""
        for name, schema in self._schemas.items():
            properties = schema.get("properties", {})
            if name.endswith(".Logprobs"):  # of completions: the first token of a prompt follows nothing
                for field in ("token_logprobs", "top_logprobs"):
                    items = properties[field]["anyOf"][0]
                    items["items"] = {"anyOf": [items["items"], {"type": "null"}]}
            elif name.endswith(".Embedding"):  # with encoding_format base64
                properties["embedding"] = {"anyOf": [properties["embedding"], {"type": "string"}]}
            elif name.endswith("Completion.CompletionChoice"):  # null in the chunks of a stream but the last
                properties["finish_reason"] = {"anyOf": [properties["finish_reason"], {"type": "null"}]}
