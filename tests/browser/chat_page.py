"""What a person does on the chat page, for tests: found by what a screen reader says, not by how it is built."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Locator, Page, expect
from serving import wait_for

LONG = {"ignore_eos": True, "max_tokens": 50_000, "temperature": 0}
"""Settings for an answer that goes on until it is stopped, however fast the machine is; needs --context-shift."""

IS_SAVED = """async (text) => {
    const { Store } = await import("/webui/store.js");
    let found = false;
    await (await Store.open()).everyMessage(({ content }) => { found ||= content.includes(text); });
    return found;
}"""


def open_window(page: Page, url: str) -> Page:
    """Another window of this browser at this address. A tab behind another draws once a second only, and what is done there
    waits for that."""
    with page.context.expect_page() as opened:
        page.evaluate("(url) => { open(url, '', 'popup,noopener'); }", url)
    return opened.value


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
    expect(page.get_by_role("button", name="Stop generating")).to_be_hidden(timeout=60_000)


def wait_until_saved(page: Page, text: str) -> None:
    """Until a message with this text is in the browser's database."""
    wait_for(lambda: page.evaluate(IS_SAVED, text), 15)


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Assistant")


def questions(page: Page) -> Locator:
    return page.get_by_role("article", name="You")


def conversations(page: Page) -> Locator:
    return page.locator("#conversations .open")


def choose(page: Page, **fields: Any) -> None:
    """Further fields of the requests of this conversation."""
    page.get_by_role("button", name="Conversation settings").click()
    page.get_by_label("Additional request fields (JSON)").fill(json.dumps(fields))
    page.get_by_role("button", name="Save", exact=True).click()


def dictate(page: Page, text: str) -> None:
    """The next answers will be this text, token by token."""
    choose(page, structured_outputs={"choice": [text]})


def start_new(page: Page) -> None:
    page.get_by_role("button", name="New chat").click()
    expect(questions(page)).to_have_count(0)


def exported(page: Page) -> dict:
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    return json.loads(download.value.path().read_text(encoding="utf-8"))


def take_in(page: Page, content: dict | str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    page.locator("#import-file").set_input_files(
        {"name": "c.json", "mimeType": "application/json", "buffer": text.encode()}
    )


def long_conversation(turns: int) -> dict:
    messages = []
    for number in range(turns):
        parent = messages[-1]["id"] if messages else None
        user = {
            "id": f"q{number}",
            "parent": parent,
            "role": "user",
            "content": f"Question {number}?",
            "created": 2 * number,
        }
        text = f"Answer {number}: **bold**, `code`\n\n```python\nfor x in range({number}):\n    print(x)\n```\n\n- one\n- two"
        answer = {
            "id": f"a{number}",
            "parent": user["id"],
            "role": "assistant",
            "content": text,
            "created": 2 * number + 1,
        }
        messages += [user, answer | {"status": "done"}]
    whole = {"title": "A long one", "leaf": messages[-1]["id"], "messages": messages}
    return {"format": "labinfer-conversations", "version": 1, "conversations": [whole]}
