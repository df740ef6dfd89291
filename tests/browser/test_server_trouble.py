"""A server that is away, busy, going, or asks for a key: clear words, and the page comes back by itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from chat_page import LONG, answers, ask, choose, open_window, send, wait_for_end
from launchers import kill_tree
from playwright.sync_api import Page, Request, expect
from serving import Server, serving, wait_for

KEY = "sesame-open-please"
QUESTIONS = ("/ready", "/health")
"""What the page asks every few seconds, in order."""


def demo(*flags: str) -> AbstractContextManager[Server]:
    """A server on one rank."""
    return serving("--model", "demo", "--context-shift", *flags)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """A server that asks for a key, and gives each so many tokens that an answer of 110 is more than what is left."""
    with demo("--api-key", KEY, "--tokens-per-minute", "120") as server:
        yield server


@pytest.fixture
def blank(context):
    """A page that is nowhere yet."""
    return context.new_page()


def test_server_that_was_killed_and_is_back(blank):
    page = blank
    with demo() as first:
        port = first.url.rpartition(":")[2]
        page.goto(first.url)
        expect(ask(page, "17 + 25 = ?")).to_contain_text("42")
        choose(page, **LONG)
        send(page, "Count from 3 to 15.")
        expect(answers(page).last).to_contain_text("3, 4")
        kill_tree(first.process)
        expect(answers(page).last).to_contain_text("The connection was lost")
        expect(answers(page).last).to_contain_text("3, 4")  # what had come stays
        choose(page, temperature=0)
        send(page, "20 + 3 = ?")  # waits for the server
        expect(answers(page).last).to_contain_text("cannot be reached")
        expect(page.get_by_role("status").filter(has_text="cannot be reached")).to_be_visible()
    with demo("--port", port):
        wait_for_end(page)
        expect(answers(page).last).to_contain_text("23")
        expect(page.locator("#banner")).to_be_hidden()


def test_key_is_asked_for_refused_and_taken(blank, guarded):
    page = blank
    page.goto(guarded.url)
    expect(page.locator("#banner")).to_contain_text("requires an API key")
    page.get_by_role("button", name="Enter API key").click()
    expect(page.get_by_label("API key")).to_be_focused()
    page.get_by_label("API key").press_sequentially("not-the-right-key")
    page.keyboard.press("Enter")
    expect(page.locator("#banner")).to_contain_text("rejected this API key")
    send(page, "17 + 25 = ?")
    expect(answers(page)).to_contain_text("rejected this API key")
    page.get_by_role("button", name="Enter API key").click()
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Save", exact=True).click()
    wait_for_end(page)
    expect(answers(page)).to_contain_text("42")  # the question had not to be sent again
    expect(page.locator("#banner")).to_be_hidden()
    page.reload()
    expect(answers(page)).to_have_count(1)  # the saved conversation is shown again
    expect(page.locator("#banner")).to_be_hidden()
    expect(ask(page, "20 + 3 = ?")).to_contain_text("23")


def test_busy_server_is_waited_for_and_one_that_shuts_down_says_so(blank):
    with demo("--max-open-requests", "1", "--drain-timeout", "12") as server:
        blank.goto(server.url)
        other = open_window(blank, server.url)
        choose(other, **LONG)
        send(other, "Count from 3 to 15.")
        expect(answers(other).last).to_contain_text("3, 4")
        send(blank, "17 + 25 = ?")
        expect(answers(blank)).to_contain_text("The server is overloaded")
        other.get_by_role("button", name="Stop generating").click()
        wait_for_end(blank)
        expect(answers(blank)).to_contain_text("42")
        choose(blank, **LONG)
        send(blank, "Count from 3 to 15.")
        expect(answers(blank).last).to_contain_text("3, 4")
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/ready")[0] != 200, 10)
        blank.evaluate("dispatchEvent(new Event('online'))")  # it asks at once, and not in its seconds' turn
        expect(blank.locator("#banner")).to_contain_text("shutting down")


def test_caller_who_has_had_its_share_waits_for_the_next(blank, guarded):
    blank.add_init_script(f"localStorage.setItem('labinfer.key', '{KEY}');")
    blank.goto(guarded.url)
    choose(blank, ignore_eos=True, max_tokens=110)
    ask(blank, "Count from 3 to 15.")
    send(blank, "17 + 25 = ?")
    expect(answers(blank).last).to_contain_text("Rate limit reached")
    blank.get_by_role("button", name="Stop generating").click()  # waiting can be given up
    wait_for_end(blank)
    expect(answers(blank).last).to_contain_text("stopped")


def test_tab_that_nobody_looks_at_asks_the_server_nothing(fresh_context, server):
    page, asked = fresh_context.new_page(), []  # the clock is a context's
    page.on("request", lambda request: asked.append(request) if request.url.endswith(QUESTIONS) else None)
    page.clock.install()
    page.goto(server.url)
    page.get_by_role("combobox", name="Model").wait_for()
    for _ in range(2):
        with page.expect_request_finished(is_last_question):
            page.clock.run_for(6000)
    look(page, False)
    page.clock.run_for(6000)  # this one has been planned already
    page.wait_for_timeout(500)
    asked.clear()
    for _ in range(10):
        page.clock.run_for(6000)
        page.wait_for_timeout(50)
    assert asked == []
    with page.expect_request_finished(is_last_question):
        look(page, True)
    with page.expect_request_finished(is_last_question):
        page.clock.run_for(6000)


def is_last_question(request: Request) -> bool:
    """Whether the page has asked all, and plans to ask again."""
    return request.url.endswith(QUESTIONS[-1])


def look(page: Page, at_it: bool) -> None:
    """Bring this tab to the front of its window, or another one."""
    page.evaluate(
        """(hidden) => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        not at_it,
    )
