"""What a visit costs: which files come over the network, and which the browser has."""

from __future__ import annotations

import re

from playwright.sync_api import expect


def test_page_that_is_known_loads_without_its_files(fresh_context, server):
    page = fresh_context.new_page()
    network = fresh_context.new_cdp_session(page)
    network.send("Network.enable")
    asked: dict[str, str] = {}  # paths by request
    network.on("Network.requestWillBeSent", lambda event: asked.update({event["requestId"]: event["request"]["url"]}))
    network.on("Network.requestServedFromCache", lambda event: asked.pop(event["requestId"], None))
    network.on("Network.responseReceived", lambda event: drop_kept(asked, event))

    def files_of(visit) -> list[str]:
        asked.clear()
        visit()
        expect(page.get_by_role("link", name="Skip to")).to_have_count(1)
        page.wait_for_timeout(100)  # all has been asked for when a page is loaded, and this is to hear of it
        paths = [url.removeprefix(server.url) for url in asked.values() if "/webui/" in url]
        return [path for path in paths if not path.endswith("icon.svg")]  # the browser's own request, for the tab

    first = files_of(lambda: page.goto(server.url))
    assert len(first) > 30
    assert all(re.match(r"/webui/v-[0-9a-f]{16}/", path) for path in first), first
    assert files_of(page.reload) == []
    cluster = files_of(lambda: page.goto(f"{server.url}/cluster"))
    assert cluster and not set(cluster) & set(first)  # what both pages use is there already
    for visit in (page.go_back, page.go_forward, lambda: page.goto(f"{server.url}/#other")):  # each is another page
        assert files_of(visit) == []


def drop_kept(asked: dict[str, str], event: dict) -> None:
    if event["response"].get("fromDiskCache"):
        asked.pop(event["requestId"], None)
