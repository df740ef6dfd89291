"""Languages, appearances, telephones, keyboards and screen readers."""

from __future__ import annotations

import pytest
from axe_findings import findings
from chat_page import (
    answers,
    ask,
    choose,
    conversations,
    dictate,
    long_conversation,
    questions,
    send,
    take_in,
    wait_for_end,
)
from playwright.sync_api import expect

RICH = """<think>Hm.</think>## Title

Text with `code` and [a link](https://example.com).

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x): return 'y' + 1  # why
```"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page, theme):
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    expect(page.locator("html")).to_have_attribute("data-theme", theme)
    files = [("note.txt", b"Alice"), ("paper.pdf", b"%PDF-1.7")]
    page.locator("#attach-files").set_input_files(
        [{"name": name, "mimeType": "text/plain", "buffer": content} for name, content in files]
    )
    expect(page.locator("#not-attached")).to_be_visible()
    assert findings(page) == []
    page.get_by_role("button", name="Remove note.txt").click()
    page.keyboard.press("Control+/")
    assert findings(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Conversation settings").click()
    page.get_by_label("Logprobs").select_option(label="Top 1")
    page.get_by_role("button", name="Save as preset").click()
    page.get_by_label("Temperature").fill("-1")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("dialog").get_by_role("alert")).not_to_be_empty()
    assert findings(page) == []
    page.get_by_label("Temperature").fill("")
    page.get_by_role("button", name="Save", exact=True).click()
    dictate(page, RICH)
    answer = ask(page, "Go.")
    answer.get_by_role("button", name="Regenerate").click()
    wait_for_end(page)
    answers(page).get_by_text("Reasoning").click()
    answers(page).get_by_role("button", name="Token probabilities").click()
    assert findings(page) == []
    page.get_by_role("button", name="Preferences").click()
    assert findings(page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_where_messages_are_changed(page, theme):
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    expect(page.locator("html")).to_have_attribute("data-theme", theme)
    file = long_conversation(3)
    messages = file["conversations"][0]["messages"]
    messages[0] |= {"attachments": [{"name": "note.txt", "text": "My name is Alice."}]}
    messages[1] |= {"edited": True}
    messages[2] |= {"begins": {"summary": "Alice asked a question."}}
    messages[5] |= {
        "status": "failed",
        "failure": {"kind": "failed", "message": "x", "code": "context_length_exceeded"},
    }
    take_in(page, file)
    expect(page.locator("#context")).to_be_visible()
    page.get_by_text("note.txt").click()
    page.get_by_text("Summary", exact=True).click()
    questions(page).nth(2).get_by_role("button", name="Edit").click()
    answers(page).nth(1).get_by_role("button", name="Edit answer").click()
    conversations(page).hover()
    page.get_by_role("button", name="Rename: A long one").click()
    assert findings(page) == []
    page.keyboard.press("Escape")
    answers(page).first.get_by_role("button", name="Delete message").click()
    assert findings(page) == []
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    take_in(page, "no JSON")
    expect(page.get_by_role("dialog")).to_contain_text("Import failed")
    assert findings(page) == []


def test_language_follows_the_browser_and_can_be_switched(browser, server):
    context = browser.new_context(locale="zh-CN", viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(server.url)
    expect(page.get_by_role("heading", name="想问点什么？")).to_be_visible()
    expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
    page.get_by_role("button", name="偏好设置").click()
    page.get_by_label("语言").select_option(label="English")
    page.get_by_role("button", name="保存").click()
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    page.reload()
    expect(page.get_by_role("button", name="New chat")).to_be_visible()
    context.close()


def test_both_languages_say_the_same_things(page):
    english, chinese = page.evaluate(
        """async () => {
            const { english } = await import("/webui/words_en.js");
            const { chinese } = await import("/webui/words_zh.js");
            const keys = (words) => Object.entries(words).flatMap(([key, value]) =>
                [`${key}: ${typeof value}`, ...(typeof value === "object" ? Object.keys(value) : [])]);
            return [keys(english), keys(chinese)];
        }"""
    )
    assert sorted(english) == sorted(chinese) and len(english) > 80


def test_theme_can_be_chosen_and_is_kept(page):
    page.get_by_role("button", name="Preferences").click()
    page.get_by_label("Theme").select_option(label="Dark")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_telephone(browser, server):
    context = browser.new_context(
        locale="en-US", viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, device_scale_factor=2
    )
    page = context.new_page()
    page.goto(server.url)
    dictate(page, RICH)
    box = page.get_by_role("textbox", name="Write a message")
    box.fill("What is in a table with a rather long title")
    page.keyboard.press("Enter")  # begins a line: there is no Shift+Enter
    page.keyboard.type("that does not fit?")
    page.get_by_role("button", name="Send").tap()
    expect(answers(page)).to_have_count(1)
    wait_for_end(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    expect(page.get_by_role("button", name="New chat")).to_be_hidden()
    page.get_by_role("button", name="Show conversations").click()
    expect(conversations(page)).to_have_count(1)
    assert findings(page) == []
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="New chat")).to_be_hidden()
    expect(answers(page)).to_have_count(0)
    assert findings(page) == []
    context.close()


def test_all_of_it_by_keyboard(page):
    """Ask, edit, switch the version, find the conversation again, rename it and delete it without a pointer."""
    ask(page, "17 + 25 = ?")

    def tab_to(name: str, key: str = "Tab") -> None:
        for _ in range(60):
            focused = page.evaluate(
                "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
            )
            if focused.strip().startswith(name):
                return
            page.keyboard.press(key)
        raise AssertionError(f"{name} cannot be reached by {key}")

    tab_to("Regenerate", "Shift+Tab")
    tab_to("Edit", "Shift+Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("20 + 3 = ?")
    page.keyboard.press("Enter")
    wait_for_end(page)
    expect(answers(page)).to_contain_text("23")
    expect(page.get_by_role("textbox", name="Write a message")).to_be_focused()
    tab_to("Previous version", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("42")
    page.keyboard.press("Enter")  # there is no further one, so this is for the next
    expect(answers(page)).to_contain_text("23")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("42")
    page.keyboard.press("Control+K")
    page.keyboard.type("25")
    expect(conversations(page)).to_have_count(1)
    tab_to("17 + 25")
    tab_to("Rename")
    page.keyboard.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("Sums\n")
    expect(conversations(page)).to_have_text(["Sums"])
    page.keyboard.press("Control+K")
    tab_to("Delete")
    page.keyboard.press("Enter")
    tab_to("Delete")
    page.keyboard.press("Enter")
    expect(conversations(page)).to_have_count(0)


def test_who_skips_to_the_message_box_keeps_the_conversation(page):
    ask(page, "17 + 25 = ?")
    page.get_by_role("link", name="Skip to the message box").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("textbox", name="Write a message")).to_be_focused()
    page.keyboard.type("20 + 3 = ?\n")
    wait_for_end(page)
    expect(answers(page)).to_have_count(2)


def test_focus_stays_where_a_list_is_drawn_anew(page):
    ask(page, "17 + 25 = ?")
    page.get_by_role("button", name="New chat").click()
    send(page, "20 + 3 = ?")
    export = page.get_by_role("button", name="Export: 17 + 25 = ?")
    conversations(page).nth(1).focus()
    export.focus()
    wait_for_end(page)
    expect(export).to_be_focused()
    page.get_by_role("button", name="Delete: 17 + 25 = ?").focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Delete").focus()
    page.keyboard.press("Enter")
    expect(conversations(page)).to_have_count(1)
    expect(page.get_by_role("button", name="New chat")).to_be_focused()


def test_screen_reader_is_told_how_an_answer_ends(page):
    said = page.locator("#said")
    ask(page, "17 + 25 = ?")
    expect(said).to_have_text("The answer is complete.")
    choose(page, ignore_eos=True)
    send(page, "Count from 3 to 15.")
    expect(said).to_have_text("The answer is being generated.")
    page.keyboard.press("Escape")
    expect(said).to_have_text("stopped")
    choose(page, temperature=-1)
    ask(page, "17 + 25 = ?")
    expect(said).to_contain_text("temperature")
