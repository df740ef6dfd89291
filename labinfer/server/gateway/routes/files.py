"""``/v1/files``: OpenAI's Files API, for the input and the output of batches."""

from __future__ import annotations

import contextlib
import re
from pathlib import PurePosixPath

from python_multipart.exceptions import FormParserError
from starlette.responses import FileResponse, Response

from labinfer.requests.openai import api_errors
from labinfer.requests.openai.files import FileDeleted, FileForm, FileList, FileObject
from labinfer.server.gateway.endpoint import STORED_ERRORS, STRING, endpoint
from labinfer.server.gateway.file_store import FileStore, Upload
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.multipart import MultipartReader, PartBegin
from labinfer.server.gateway.page import Page, page_query
from labinfer.server.gateway.refusals import checked

MAX_PAGE = 10_000
MAX_FIELDS, MAX_FIELD_BYTES = 4, 1 << 10
"""Maximum number of form fields in addition to the file, and maximum length of each field in bytes."""
MAX_NAME = 255
"""Maximum length of a file name, in characters."""
PURPOSE = "batch"
CONTENT_TYPE = "application/octet-stream"
ONE_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{1,18})?|-([0-9]{1,18}))")


@endpoint("POST", "/v1/files", form=FileForm, answer=FileObject, errors=(*STORED_ERRORS, 413, 415))
async def upload(context: HttpContext) -> Response:
    """Upload a file with the lines of a batch.

    The form has the fields ``purpose`` and ``file``.
    """
    store = file_store(context)
    try:
        reader = MultipartReader(context.http.headers.get("content-type", ""))
    except FormParserError as error:
        raise api_errors.unsupported_form(str(error)) from None
    with contextlib.closing(store.begin(context.caller.owner)) as incoming:
        try:
            return context.json(await _read_form(context, reader, incoming))
        except FormParserError as error:
            raise api_errors.bad_request(str(error)) from None


async def _read_form(context: HttpContext, reader: MultipartReader, incoming: Upload) -> FileObject:
    """Read a form, write the file in it to ``incoming``, and store the file. Returns the metadata of the file.

    Raises:
        ApiError: a part is missing, or the file is too long.
        FormParserError: the form is invalid.
    """
    fields: dict[str, bytearray] = {}
    filename, part = None, PartBegin("", None)
    async for piece in context.http.stream():
        for event in reader.feed(piece):
            if isinstance(event, PartBegin):
                part = event
                if part.name == "file":
                    if filename is not None:
                        raise FormParserError("file: the form has two files")
                    filename = PurePosixPath(part.filename or "file.jsonl").name[-MAX_NAME:]
            elif part.name == "file":
                incoming.write(event)
            else:
                field = fields.setdefault(part.name[:MAX_NAME], bytearray())
                field += event
                if len(field) > MAX_FIELD_BYTES or len(fields) > MAX_FIELDS:
                    raise FormParserError(f"{part.name[:MAX_NAME]}: the form has too many or too long fields")
    if not reader.is_whole:
        raise FormParserError("the form is truncated")
    if filename is None:
        raise api_errors.bad_request("file: the form has no file", "file")
    purpose = fields.pop("purpose", bytearray()).decode("utf-8", "replace")
    if purpose != PURPOSE:
        raise api_errors.bad_request(f"purpose must be {PURPOSE!r}, not {purpose!r:.60}", "purpose")
    for name in fields:
        raise api_errors.bad_request(f"{name} is not supported; leave it out", name)
    return incoming.finish(filename, PURPOSE)


@endpoint("GET", "/v1/files", answer=FileList, query=(*page_query(MAX_PAGE), ("purpose", STRING)), errors=STORED_ERRORS)
async def list_files(context: HttpContext) -> Response:
    """List the caller's files."""
    query = context.known_query()
    page, purpose = checked(lambda: Page.read(query, MAX_PAGE)), query.get("purpose")
    files = file_store(context).files(context.caller.owner)
    chosen = [file for file in files if purpose in (None, file.purpose)]
    return context.json(FileList(**page.cut(chosen, lambda file: file.id)))


@endpoint("GET", "/v1/files/{id}", answer=FileObject, errors=STORED_ERRORS)
async def show(context: HttpContext) -> Response:
    """Show one of the caller's files, without its content."""
    return context.json(file_store(context).file(context.caller.owner, context.http.path_params["id"]))


@endpoint("DELETE", "/v1/files/{id}", answer=FileDeleted, errors=STORED_ERRORS)
async def delete(context: HttpContext) -> Response:
    """Remove a file."""
    store, id, owner = file_store(context), context.http.path_params["id"], context.caller.owner
    store.file(owner, id)
    if context.http.app.state.batches.reads(owner, id):
        raise api_errors.bad_request(f"the file {id} is in use by a batch; cancel the batch first")
    store.delete_file(owner, id)
    return context.json(FileDeleted(id))


@endpoint(
    "GET",
    "/v1/files/{id}/content",
    answer=str,
    content_type=CONTENT_TYPE,
    statuses=(200, 206),
    errors=(*STORED_ERRORS, 416),
)
async def content(context: HttpContext) -> Response:
    """A file's content, or one range of bytes of it.

    Other ranges, such as several, are ignored, as RFC 9110 (14.2) allows.
    """
    store = file_store(context)
    file = store.file(context.caller.owner, context.http.path_params["id"])
    headers = context.http.scope["headers"]
    for value in context.http.headers.getlist("range"):
        if not _is_range(value, file.bytes) and _is_range(value) and "if-range" not in context.http.headers:
            raise api_errors.range_outside(file.bytes)
    headers[:] = [
        (name, value) for name, value in headers if name != b"range" or _is_range(value.decode("latin-1"), file.bytes)
    ]
    return FileResponse(store.content(file), headers=context.headers, media_type=CONTENT_TYPE, filename=file.filename)


def file_store(context: HttpContext) -> FileStore:
    """Return the server's file store.

    Raises:
        ApiError: the server stores no files.
    """
    if context.service.files is None:
        raise api_errors.no_files()
    return context.service.files


def _is_range(value: str, num_bytes: int | None = None) -> bool:
    """Whether the value of a ``Range`` header is a single range; with ``num_bytes``, also whether a file of this size has bytes in
    the range."""
    match = ONE_RANGE.fullmatch(value)
    if match is None or (match[2] is not None and int(match[1]) > int(match[2])):
        return False
    return num_bytes is None or (int(match[1] or 0) < num_bytes and (match[3] is None or int(match[3]) > 0))
