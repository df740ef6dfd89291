"""Web pages and their files, with cache and security headers.

The pages use the API as any other client does. They are served without an API key; only their API calls need one.

A page refers to its files by version, ``/webui/v-VERSION/…``, and modules import each other by relative paths. A browser may
therefore cache the files forever, and reloads a known page with one request. It never mixes files of two versions, even when it
reads only its cache (to go back or to restore a tab).
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from starlette.responses import Response

import labinfer
from labinfer.requests.openai import api_errors
from labinfer.server.gateway.endpoint import endpoint
from labinfer.server.gateway.http_context import HttpContext

FOLDER = Path(labinfer.__file__).parent / "server" / "webui"
CHAT_PAGE = "index.html"
CLUSTER_PAGE = "cluster.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Content types by file suffix; files with other suffixes are not served."""
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "frame-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
"""Content Security Policy of the pages (W3C, level 3): no external resources, no inline scripts or styles."""
PREVIEW = "preview/frame.html"
PREVIEW_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'unsafe-inline'",
    "img-src": "data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'self'",
    "sandbox": "allow-scripts",
}
"""Content Security Policy of the sandboxed frame that shows HTML of an answer: the frame has an opaque origin, inline styles, and
no script but ``frame.js``."""
HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
NOT_STORED = {"cache-control": "no-store"}
REVALIDATED = {"cache-control": "no-cache"}  # cached, but revalidated by ETag before each use
IMMUTABLE = {"cache-control": "public, max-age=31536000, immutable"}  # RFC 8246
ROOT = "/webui/"
VERSIONED = re.compile(r"v-([0-9a-f]{16})/(.*)", re.DOTALL)


@endpoint("GET", "/", needs_key=False, logged=False)
async def chat(context: HttpContext) -> Response:
    """The chat page."""
    return await asyncio.to_thread(_page, context, CHAT_PAGE)


@endpoint("GET", "/cluster", needs_key=False, logged=False)
async def cluster(context: HttpContext) -> Response:
    """The cluster page: ranks, stages and steps of the models."""
    return await asyncio.to_thread(_page, context, CLUSTER_PAGE)


@endpoint("GET", "/webui/{path:path}", needs_key=False, logged=False)
async def file(context: HttpContext) -> Response:
    """A file of the pages, under ``v-{version}/`` or without a version.

    Under an outdated version, the current file is served, for a page that was opened before an update of the server; browsers
    must then revalidate it.
    """
    return await asyncio.to_thread(_file, context, context.http.path_params["path"])


def _page(context: HttpContext, name: str) -> Response:
    return _answer(context, _pack_page(name, *_version()), NOT_STORED, CONTENT_TYPES[".html"])


def _file(context: HttpContext, name: str) -> Response:
    versioned = VERSIONED.fullmatch(name)
    version, name = versioned.groups() if versioned else ("", name)
    path = FOLDER / name
    content_type = CONTENT_TYPES.get(path.suffix)
    parts = Path(name).parts
    if content_type is None or ".." in parts or Path(name).is_absolute() or "\0" in name:
        raise api_errors.not_found_route(context.http.method, context.http.scope["path"])
    try:
        file = _pack_file(path, _state(path))
    except OSError:
        raise api_errors.not_found_route(context.http.method, context.http.scope["path"]) from None
    kept = IMMUTABLE if version == _version()[0] else REVALIDATED
    policy = PREVIEW_POLICY if name == PREVIEW else POLICY
    return _answer(context, file, kept | {"etag": file.etag}, content_type, policy)


class PackedFile(NamedTuple):
    """Contents of a file of the web pages, plain and gzip-compressed."""

    content: bytes
    compressed: bytes
    etag: str
    """Weak ETag: equal for the plain and the compressed content (RFC 9110, 8.8.1)."""


def _policy(policy: dict[str, str]) -> dict[str, str]:
    return {"content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items())}


def _answer(
    context: HttpContext, file: PackedFile, kept: dict[str, str], content_type: str, policy: dict[str, str] = POLICY
) -> Response:
    headers = context.headers | HEADERS | _policy(policy) | kept | {"vary": "accept-encoding"}
    if "etag" in kept and file.etag in context.http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    headers |= {"content-type": content_type}
    if "gzip" in context.http.headers.get("accept-encoding", ""):
        return Response(file.compressed, headers=headers | {"content-encoding": "gzip"})
    return Response(file.content, headers=headers)


FileState = tuple[int, int]
"""Modification time (in ns) and length (in bytes) of a file; if one changes, the file is read and compressed again."""


def _state(path: Path) -> FileState:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


@lru_cache(256)
def _pack_file(path: Path, state: FileState) -> PackedFile:
    return _pack(path.read_bytes())


@lru_cache(4)
def _pack_page(name: str, version: str, folder: Path) -> PackedFile:
    html = (folder / name).read_text(encoding="utf-8").replace(ROOT, f"{ROOT}v-{version}/")
    return _pack(html.encode())


def _pack(content: bytes) -> PackedFile:
    compressed = gzip.compress(content, 6, mtime=0)  # level 9 takes four times as long and saves 1 %
    return PackedFile(content, compressed, f'W/"{hashlib.sha256(content).hexdigest()[:32]}"')


def _version() -> tuple[str, Path]:
    """Version of the web pages, which is a digest of all their files, and the folder of the files."""
    paths = [path for path in sorted(FOLDER.rglob("*")) if path.suffix in CONTENT_TYPES]
    return _digest(FOLDER, tuple((path, _state(path)) for path in paths)), FOLDER


@lru_cache(1)
def _digest(folder: Path, files: tuple[tuple[Path, FileState], ...]) -> str:
    digest = hashlib.sha256()
    for path, _ in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest() + str(path.relative_to(folder)).encode())
    return digest.hexdigest()[:16]
