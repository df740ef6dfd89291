"""The pages and their files: what a browser is given, and what it is allowed to do with it.

The pages use the API as any other client does; a key, where one is needed, is asked for by the API and not here.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from starlette.responses import Response

from labinfer.server import api_errors
from labinfer.server.call import Call

FOLDER = Path(__file__).parent / "webui"
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
"""Of the files that are served; others are not."""
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
"""Content Security Policy Level 3 (W3C): nothing from elsewhere, nothing written into the page by an answer."""
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, and asked for again each time: a new version is in use at once
}


async def chat(call: Call) -> Response:
    """``GET /``."""
    return await _answer(call, CHAT_PAGE)


async def cluster(call: Call) -> Response:
    """``GET /cluster``."""
    return await _answer(call, CLUSTER_PAGE)


async def file(call: Call) -> Response:
    """``GET /webui/{path}``."""
    return await _answer(call, call.http.path_params["path"])


async def _answer(call: Call, name: str) -> Response:
    path = FOLDER / name
    content_type = CONTENT_TYPES.get(path.suffix)
    parts = Path(name).parts
    if content_type is None or ".." in parts or Path(name).is_absolute() or "\0" in name:
        raise api_errors.not_found_route(call.http.method, call.http.url.path)
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except OSError:
        raise api_errors.not_found_route(call.http.method, call.http.url.path) from None
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = call.headers | HEADERS | {"etag": etag}
    if etag in call.http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers | {"content-type": content_type})
