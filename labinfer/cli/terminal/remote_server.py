"""RemoteServer: chat backend for a model behind a server with OpenAI's HTTP API (API reference, "Chat")."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

import labinfer
from labinfer.base.errors import UserError
from labinfer.cli.terminal.backend import AnswerFailed, ChatReply, MessageRefused, ReasoningPiece
from labinfer.comm.group.signals import SignalGuard

TIMEOUT_SECONDS = 10.0
"""Timeout in seconds for connecting, and for the list of models."""
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Socket options for TCP keep-alive: a machine from which nothing comes for a minute counts as gone (Linux' default is two hours,
tcp(7))."""
MAX_LIST_BYTES = 1 << 24
"""Maximum size of the server's list of models, in bytes."""
MAX_ERROR_BYTES, MAX_ERROR_CHARACTERS = 1 << 16, 300
"""Maximum number of bytes that are read of an error response's body, and maximum number of its characters that are shown if the
body is not in OpenAI's format."""
API = "/v1"
DONE = b"[DONE]"
REFUSALS = (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, http.HTTPStatus.UNPROCESSABLE_ENTITY)
EVENTS = "text/event-stream"


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """Fields of a streamed chunk that this client reads. A server may omit a field or send null."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class RemoteServer:
    """Chat backend for a model behind a server. Each answer uses a new connection, so that the server may restart in
    between. See ``Backend``.

    Args:
        url: address of the server, with or without ``/v1``.
        model: name of a model of the server; empty for the server's first model.
        signals: raises ``Interrupted`` when a signal arrives while the backend waits.

    Raises:
        UserError: ``url`` or ``api_key`` is malformed.
    """

    def __init__(self, url: str, api_key: str, model: str, signals: SignalGuard):
        self.model = model
        self._url, self._signals = url, signals
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise UserError(f"--url {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.username:
            raise UserError(f"--url {url} is not a server address; give one such as http://127.0.0.1:8000")
        self._is_encrypted = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix(API) + API
        if not api_key.isascii() or not api_key.isprintable():
            raise UserError("the API key contains characters that are not allowed in an HTTP header")
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        self._headers["User-Agent"] = f"labinfer/{labinfer.__version__}"
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def describe(self) -> str:
        self._find_model()
        return f"{self.model} at {self._url}"

    def stream(self, messages: list[dict[str, str]], settings: dict[str, Any], answer: ChatReply) -> Iterator[str]:
        self._find_model()
        body = {"model": self.model, "messages": messages, **settings}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._ask("POST", "/chat/completions", body) as response:
            for chunk in self._chunks(response, answer):
                for choice in chunk.choices or ():
                    answer.finish_reason = choice.finish_reason or answer.finish_reason
                    delta = choice.delta or _Delta()
                    if reasoning := delta.reasoning or delta.reasoning_content:
                        yield ReasoningPiece(reasoning)
                    if text := delta.content or delta.refusal:
                        yield text
                if usage := chunk.usage:
                    answer.prompt_tokens, answer.num_tokens = usage.prompt_tokens, usage.completion_tokens
                    details = usage.prompt_tokens_details
                    answer.cached_tokens = details.cached_tokens if details else None

    def _find_model(self) -> None:
        if self.model:
            return
        with self._ask("GET", "/models") as response:
            with self._signals.raising():
                data = response.read(MAX_LIST_BYTES)
        try:
            self.model = _parse(data, _Models).data[0].id
        except (ValueError, IndexError):
            raise AnswerFailed(f"{self._url} lists no models; is it an OpenAI-compatible server?") from None

    @contextmanager
    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """Context with a successful HTTP response. The end of the context closes the connection, which makes the server stop
        generating."""
        kind = http.client.HTTPSConnection if self._is_encrypted else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT_SECONDS)
        response = None
        try:
            with self._signals.raising():
                connection.connect()
                if body is not None:  # an answer may take long, so TCP keep-alive replaces the timeout
                    connection.sock.settimeout(None)
                    for option in KEEP_ALIVE:
                        connection.sock.setsockopt(*option)
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, self._path + path, data, self._headers)
                response = connection.getresponse()
                if response.status != http.client.OK:
                    raise _refusal(response, "Authorization" in self._headers)
            yield response
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: an invalid host name
            what = f"cannot reach {self._url}" if response is None else f"lost the connection to {self._url}"
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            hint = "; if the server has no TLS, use http:// instead of https://" if _is_not_tls(error) else ""
            raise AnswerFailed(f"{what}: {reason}{hint}") from None
        finally:
            if response is not None:  # the response keeps the socket open, too
                response.close()
            connection.close()

    def _chunks(self, response: http.client.HTTPResponse, answer: ChatReply) -> Iterator[_Chunk]:
        """Yield the data of server-sent events (WHATWG HTML, "Server-sent events") up to ``[DONE]``. An answer with a finish reason
        is also complete, as some servers do not send ``[DONE]``."""
        data, is_stream = b"", False
        while True:
            with self._signals.raising():
                line = response.readline()
            line, is_at_end = line.rstrip(b"\r\n"), not line
            if line.startswith(b"data:"):
                data, is_stream = data + line.removeprefix(b"data:"), True
            elif not line and data:
                if data.strip() == DONE:
                    return
                try:
                    chunk, data = _parse(data, _Chunk), b""
                except ValueError as error:
                    raise AnswerFailed(f"invalid event from the server: {data[:60]!r}: {error}") from None
                if chunk.error:
                    raise AnswerFailed(
                        _message({"error": chunk.error}) or "the server reported an error without a message"
                    )
                yield chunk
            if is_at_end and answer.finish_reason:
                return
            if is_at_end:
                kind = response.headers.get_content_type()
                if not is_stream and kind != EVENTS:
                    raise AnswerFailed(
                        f"{self._url} answers with {kind} instead of {EVENTS}; does the server support streaming?"
                    )
                raise AnswerFailed(f"{self._url} closed the connection in the middle of the reply")


def _is_not_tls(error: Exception) -> bool:
    """Whether ``error`` means that the server does not use TLS."""
    return getattr(error, "reason", "") in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")


def _parse(data: bytes, kind: Any) -> Any:
    """Decode JSON as ``kind``. Accepts integers written as ``3.0`` and lone surrogates, which msgspec's decoder refuses.

    Raises:
        ValueError: ``data`` is not JSON of this type.
    """
    try:
        return msgspec.convert(json.loads(data), kind, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _refusal(response: http.client.HTTPResponse, has_key: bool) -> AnswerFailed:
    """Exception for an HTTP error response, with the server's message and a hint."""
    data = response.read(MAX_ERROR_BYTES)
    try:
        text = _message(_parse(data, Any))
    except ValueError:
        text = ""
    text = text or " ".join(data.decode(errors="replace").split())[:MAX_ERROR_CHARACTERS]
    text = text or response.reason or "no reason given"
    if response.status == http.HTTPStatus.UNAUTHORIZED:
        if not has_key:
            return AnswerFailed("the server needs an API key; give --api-key KEY, or set LABINFER_API_KEY")
        return AnswerFailed(f"the server rejects the API key: {text}")
    after = response.getheader("Retry-After", "")
    hint = f"; try again in {after} seconds" if after.isdigit() else ""
    kind = MessageRefused if response.status in REFUSALS else AnswerFailed
    return kind(f"{text} (HTTP {response.status}){hint}")


def _message(body: Any) -> str:
    """The message in an error object of OpenAI's format; empty if there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return text if isinstance(text, str) else ""
