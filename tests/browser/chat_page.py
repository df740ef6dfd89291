"""What a person does on the chat page, for tests: found by what a screen reader says, not by how it is built."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Locator, Page, expect

LONG = {"ignore_eos": True, "max_tokens": 50_000, "temperature": 0}
"""Settings for an answer that goes on until it is stopped, however fast the machine is; needs --context-shift."""


def send(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Write a message").fill(text)
    page.keyboard.press("Enter")


def ask(page: Page, text: str) -> Locator:
    """Send, and wait for the end of the answer."""
    count = answers(page).count()
    send(page, text)
    expect(answers(page)).to_have_count(count + 1)
    wait_for_end(page)
    return answers(page).last


def wait_for_end(page: Page) -> None:
    expect(page.get_by_role("button", name="Stop the answer")).to_be_hidden(timeout=60_000)


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer")


def questions(page: Page) -> Locator:
    return page.get_by_role("article", name="You")


def conversations(page: Page) -> Locator:
    return page.locator("#conversations .open")


def choose(page: Page, **fields: Any) -> None:
    """Further fields of the requests of this conversation."""
    page.get_by_role("button", name="Settings of this conversation").click()
    page.get_by_label("Further fields of the request (JSON)").fill(json.dumps(fields))
    page.get_by_role("button", name="Save").click()


def dictate(page: Page, text: str) -> None:
    """The next answers will be this text, token by token."""
    choose(page, structured_outputs={"choice": [text]})
