"""The pages' files as the gateway serves them; what is vendored is what VENDOR.md says."""

from __future__ import annotations

import asyncio
import configparser
import hashlib
import re
import shutil
from pathlib import Path

import httpx
import pytest

from labinfer.server.gateway.app import make_app
from labinfer.server.gateway.async_llm_engine import AsyncLLMEngine
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.routes import pages
from labinfer.server.gateway.routes.pages import CONTENT_TYPES, FOLDER
from labinfer.server.gateway.service import Service

FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.suffix in CONTENT_TYPES)
VENDOR = FOLDER / "vendor"
OWN = [path for path in FOLDER.rglob("*.js") if VENDOR not in path.parents]


class Client:
    """Asks the application without a network; a key would be needed for its API."""

    def __init__(self, service: Service):
        self._transport = httpx.ASGITransport(make_app(service))

    def get(self, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://localhost") as client:
                request = client.build_request(method, "/", headers=headers)
                request.url = httpx.URL(
                    scheme="http", host="localhost", raw_path=path.encode()
                )  # as it stands, ".." and all
                return await client.send(request)

        return asyncio.run(ask())


@pytest.fixture
def client() -> Client:
    options = ServerOptions(api_key=("a-long-enough-key",))
    return Client(Service(options, ["demo"], AsyncLLMEngine()))


@pytest.mark.parametrize("page", ["/", "/cluster"])
def test_page_needs_no_key_while_the_api_does(client, page):
    assert client.get(page).status_code == 200
    assert "<!doctype html>" in client.get(page).text
    assert client.get("/v1/models").status_code == 401


def test_page_may_load_from_its_own_server_only(client):
    for path in ("/", "/cluster", "/webui/main.js"):
        policy = dict(part.split(" ", 1) for part in client.get(path).headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in str(policy) and "http" not in str(policy)


def test_frame_of_previews_reaches_nothing(client):
    policy = client.get("/webui/preview/frame.html").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert policy.endswith("sandbox allow-scripts")
    assert "connect-src" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("name", FILES)
def test_every_file_comes_as_what_it_is(client, name):
    answer = client.get(f"/webui/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == CONTENT_TYPES[Path(name).suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_unchanged_file_is_not_sent_again(client):
    first = client.get("/webui/main.js")
    again = client.get("/webui/main.js", **{"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert again.headers["etag"] == first.headers["etag"]
    other = client.get("/webui/chat.js", **{"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200
    assert first.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("page", ["/", "/cluster"])
def test_page_names_files_that_are_kept_for_good(client, page):
    answer = client.get(page)
    assert answer.headers["cache-control"] == "no-store"
    paths = re.findall(r'(?:src|href)="(/webui/[^"]*)"', answer.text)
    assert len(paths) > 5 and len({path.split("/")[2] for path in paths}) == 1
    for path in paths:
        file = client.get(path)
        assert file.status_code == 200 and "immutable" in file.headers["cache-control"]


def test_changed_file_changes_the_address_of_all(client, tmp_path, monkeypatch):
    """Whatever a browser has kept, it cannot be mixed with files of another version."""
    monkeypatch.setattr(pages, "FOLDER", Path(shutil.copytree(FOLDER, tmp_path / "webui")))
    old = main_module(client)
    assert main_module(client) == old
    katex = pages.FOLDER / "vendor/katex/katex.mjs"
    katex.write_bytes(katex.read_bytes().replace(b"0", b"1", 1))
    new = main_module(client)
    assert new != old
    assert "immutable" in client.get(new).headers["cache-control"]
    left_open = client.get(old.replace("main.js", "vendor/katex/katex.mjs"))  # a page that meets its first formula now
    assert left_open.content == katex.read_bytes()
    assert left_open.headers["cache-control"] == "no-cache"
    katex.rename(katex.with_name("other.mjs"))
    assert main_module(client) != new


def main_module(client: Client) -> str:
    found = re.search(r'src="(/webui/v-[0-9a-f]+/main\.js)"', client.get("/").text)
    assert found
    return found[1]


def test_files_are_compressed_for_who_takes_it(client):
    name = "/webui/vendor/katex/katex.mjs"
    packed, plain = (client.get(name, **{"Accept-Encoding": coding}) for coding in ("gzip, br", "identity"))
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert packed.content == plain.content == (FOLDER / "vendor/katex/katex.mjs").read_bytes()
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 3
    again = client.get(name, **{"Accept-Encoding": "gzip", "If-None-Match": packed.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    for answer in (packed, plain, again):
        assert answer.headers["vary"].lower() == "accept-encoding"
        assert answer.headers["etag"].startswith("W/")  # of both, which a strong one may not be
    assert client.get("/", **{"Accept-Encoding": "gzip"}).headers["content-encoding"] == "gzip"


def test_api_is_not_compressed(client):
    assert len(client.get("/openapi.json").content) > 10_000
    assert "content-encoding" not in client.get("/openapi.json", **{"Accept-Encoding": "gzip"}).headers


@pytest.mark.parametrize(
    "path",
    [
        "/webui/",
        "/webui/none.js",
        "/webui/styles",
        "/webui/../cli.py",
        "/webui/../cli.py.js",
        "/webui/%2e%2e/webui/main.js",
        "/webui/..%2Fwebui/main.js",
        "/webui//etc/hosts.js",
        "/webui/%2Fetc%2Fhosts.css",
        "/webui/vendor/VENDOR.md",
        "/webui/main.js%00.css",
        "/webui/v-0123456789abcdef/",
        "/webui/v-0123456789abcdef/../cli.py",
        "/webui/v-0123456789abcdef/%2Fetc%2Fhosts.css",
        "/webui/v-0123456789abcdef/v-0123456789abcdef/main.js",
        "/webui/v-0123456789abcde/main.js",
        "/webui/" + "a" * 5000 + ".js",
    ],
)
def test_nothing_else_is_served(client, path):
    assert client.get(path).status_code == 404


def test_other_methods_are_refused(client):
    assert client.get("/", method="POST").status_code == 405
    assert client.get("/", method="HEAD").status_code == 200


@pytest.mark.parametrize("page", ["index.html", "cluster.html"])
def test_page_has_no_script_or_style_of_its_own(page):
    html = (FOLDER / page).read_text(encoding="utf-8")
    assert not re.search(r"<style|style=|\son\w+=|javascript:|<script(?! type=\"module\" src=)", html)
    assert not re.search(r"https?://", html)


def test_nothing_of_ours_names_another_machine():
    for path in [*OWN, *FOLDER.rglob("styles/*.css")]:
        addresses = re.findall(r"https?://[^\s\"'`)]+", path.read_text(encoding="utf-8"))
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, path


def test_files_are_short_and_say_what_they_are():
    assert len(OWN) > 20
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("// "), path
        assert text.count("\n") < 400, path


def test_what_is_vendored_is_what_is_written_down():
    text = (VENDOR / "VENDOR.md").read_text(encoding="utf-8")
    written = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", text, re.M)}
    found = {
        str(path.relative_to(VENDOR)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "VENDOR.md"
    }
    assert found == written
    for folder in {name.split("/")[0] for name in found}:
        assert f"{folder}/LICENSE" in found


def test_package_brings_every_file():
    setup = configparser.ConfigParser()
    setup.read(FOLDER.parents[2] / "setup.cfg")
    patterns = setup["options.package_data"]["labinfer"].split(", ")
    brought = {path for pattern in patterns for path in FOLDER.parents[1].glob(pattern)}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} <= brought
