"""A real browser in front of a real server: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from chromium import CHROMIUM, FLAGS, watched
from cluster_page import FAKE_FEED, cluster, wait_streams
from serving import Server, serving

TIMEOUT_MS = 15_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not CHROMIUM and not os.environ.get("CI"):
        for item in items:
            if "tests/browser" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="no chromium here; apt-get install chromium"))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A pipeline of two stages."""
    with serving("--model", "demo", "--context-shift", launcher="mpirun", ranks=2) as running:
        yield running


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import expect, sync_playwright

    assert CHROMIUM, "CI needs chromium: apt-get install chromium"
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="session")
def shared_context(browser):
    opened = browser.new_context(
        locale="en-US", viewport={"width": 1280, "height": 800}, permissions=["clipboard-read", "clipboard-write"]
    )
    opened.set_default_timeout(TIMEOUT_MS)
    opened.new_page()  # stays: with its last page a window closes, and to open another takes longer than most tests
    yield opened
    opened.close()


@pytest.fixture
def context(shared_context):
    """A browser, in English, on a large screen. It has the pages' files from earlier tests, which saves half of the time,
    and nothing else of them."""
    yield shared_context
    blank, *visited = shared_context.pages
    origins = {"{0.scheme}://{0.netloc}".format(urlsplit(page.url)) for page in visited}
    for page in visited:  # all, before anything is cleared: one could write again
        page.close()
    session = shared_context.new_cdp_session(blank)
    for origin in origins:
        if origin.startswith("http"):
            session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "local_storage,indexeddb"})
    session.detach()
    shared_context.clear_cookies()


@pytest.fixture
def fresh_context(browser):
    """A browser that has never been anywhere."""
    opened = browser.new_context(locale="en-US")
    opened.set_default_timeout(TIMEOUT_MS)
    yield opened
    opened.close()


@pytest.fixture
def page(context, server):
    """The chat page."""
    with watched(context, server) as page:
        page.goto(server.url)
        page.get_by_role("combobox", name="Model").wait_for()  # it knows the server
        yield page


@pytest.fixture
def opened(context, server):
    """The cluster page with a feed of two stages that is made up, before any news."""
    with watched(context, server) as page:
        page.add_init_script(FAKE_FEED.replace("%CLUSTER%", json.dumps(cluster())))
        page.goto(server.url + "/cluster")
        wait_streams(page, 1)
        yield page
