"""HubServer: a local server with the APIs of the Hugging Face hub and of ModelScope that the clients use to download a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves models from folders, to real clients of both hubs.

    Attributes:
        models: folder of each model by its id.
        requests: method and path of each request, in order.
        broken: names of files that are answered with status 404.
        gated: ids of models that are answered with status 403.
    """

    def __init__(self, models: dict[str, Path]):
        self.models, self.requests, self.broken, self.gated = models, [], set[str](), set[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                url = urlsplit(self.path)
                hub.answer(self, unquote(url.path).strip("/").split("/"), parse_qs(url.query))

            do_HEAD = do_GET

            def log_message(self, *arguments) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @classmethod
    @contextmanager
    def running(cls, models: dict[str, Path]) -> Iterator[HubServer]:
        hub = cls(models)
        thread = threading.Thread(target=hub._server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub._server.shutdown()
            hub._server.server_close()
            thread.join()

    def answer(self, handler: BaseHTTPRequestHandler, path: list[str], query: dict[str, list[str]]) -> None:
        if any(f"/{model}" in handler.path for model in self.gated):
            send(handler, 403, b"{}", {"Content-Type": "application/json", "X-Error-Code": "GatedRepo"})
            return
        match path:
            case ["api", "models", owner, name, "revision", _]:
                folder = self.models.get(f"{owner}/{name}")
                siblings = [{"rfilename": file.name} for file in sorted(folder.iterdir())] if folder else []
                info = {"id": f"{owner}/{name}", "sha": REVISION, "siblings": siblings, "tags": [], "private": False}
                send_json(handler, 200 if folder else 404, info if folder else {"error": "Repository not found"})
            case ["api", "models", owner, name, "tree", _]:
                folder = self.models[f"{owner}/{name}"]
                send_json(handler, 200, [hugging_face_entry(file) for file in sorted(folder.iterdir())])
            case [owner, name, "resolve", _, file]:
                self.send_file(handler, self.models[f"{owner}/{name}"] / file)
            case ["api", "v1", "models", owner, name, "repo", "files"]:
                if folder := self.models.get(f"{owner}/{name}"):
                    files = [modelscope_entry(file) for file in sorted(folder.iterdir())]
                    send_json(handler, 200, {"Code": 200, "Success": True, "Data": {"Files": files}})
                else:
                    send_json(handler, 404, {"Code": 10010205001, "Success": False, "Message": "record not found"})
            case ["api", "v1", "models", owner, name, "repo"]:
                self.send_file(handler, self.models[f"{owner}/{name}"] / query["FilePath"][0])
            case _:
                send_json(handler, 404, {"error": f"no such path: {handler.path}"})

    def send_file(self, handler: BaseHTTPRequestHandler, file: Path) -> None:
        if file.name in self.broken:
            return send_json(handler, 404, {"error": "broken"})
        data = file.read_bytes()
        headers = {"Content-Type": "application/octet-stream", "ETag": f'"{digest(file)}"', "X-Repo-Commit": REVISION}
        return send(handler, 200, data, headers)


def hugging_face_entry(file: Path) -> dict:
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": digest(file)}


def modelscope_entry(file: Path) -> dict:
    return {"Path": file.name, "Name": file.name, "Type": "blob", "Size": file.stat().st_size, "Sha256": digest(file)}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def send_json(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
    errors = {"X-Error-Code": "RepoNotFound"} if status == 404 else {}
    send(handler, status, json.dumps(body).encode(), {"Content-Type": "application/json", **errors})


def send(handler: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(data))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data)
