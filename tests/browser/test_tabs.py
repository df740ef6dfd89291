"""Several tabs of one browser: what one of them does is seen in the others, and disturbs nobody there."""

from __future__ import annotations

import re

from chat_page import (
    LONG,
    answers,
    ask,
    choose,
    conversations,
    exported,
    long_conversation,
    open_window,
    questions,
    send,
    take_in,
    wait_for_end,
    wait_until_saved,
)
from playwright.sync_api import expect


def test_two_tabs_show_the_same(page, server):
    other = open_window(page, server.url)
    ask(page, "17 + 25 = ?")
    expect(conversations(other)).to_have_text(["17 + 25 = ?"])
    conversations(other).click()
    expect(answers(other)).to_contain_text("42")
    box = other.get_by_role("textbox", name="Write a message")
    box.fill("half a thought")
    ask(page, "20 + 3 = ?")
    expect(answers(other).nth(1)).to_contain_text("23")
    expect(box).to_have_value("half a thought")
    conversations(page).hover()
    page.get_by_role("button", name="Rename: 17 + 25 = ?").click()
    page.keyboard.type("Sums\n")
    expect(other.get_by_role("heading", name="Sums")).to_be_visible()
    choose(other, temperature=0)
    assert len(exported(page)["conversations"][0]["settings"]["extra"]) == 1
    conversations(other).hover()
    other.get_by_role("button", name="Delete: Sums").click()
    other.get_by_role("dialog").get_by_role("button", name="Delete").click()
    for tab in (page, other):
        expect(conversations(tab)).to_have_count(0)
        expect(questions(tab)).to_have_count(0)


def test_editor_stays_open_while_another_tab_goes_on(page):
    ask(page, "17 + 25 = ?")
    other = open_window(page, page.url)
    editor = other.get_by_label("Edit message")
    questions(other).get_by_role("button", name="Edit").click()
    editor.fill("20 + 3 = ?")
    ask(page, "What is the capital of France?")
    expect(answers(other).nth(1)).to_contain_text("Paris")
    expect(editor).to_have_value("20 + 3 = ?")
    expect(editor).to_be_focused()
    questions(page).first.get_by_role("button", name="Edit").click()  # the same message
    page.get_by_label("Edit message").fill("2 + 2 = ?")
    page.keyboard.press("Enter")
    wait_for_end(page)
    expect(answers(page)).to_have_count(1)
    expect(answers(other)).to_have_count(2)  # of the version that is edited here
    expect(editor).to_have_value("20 + 3 = ?")
    other.keyboard.press("Enter")
    wait_for_end(other)
    expect(answers(other)).to_contain_text("23")
    expect(questions(other).get_by_label("Version 3 of 3")).to_be_visible()
    expect(questions(page).get_by_label("Version 3 of 3")).to_be_visible()
    assert len(exported(other)["conversations"]) == 1


def test_versions_can_be_chosen_after_another_tab_went_on(page):
    ask(page, "17 + 25 = ?")
    questions(page).get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("20 + 3 = ?")
    page.keyboard.press("Enter")
    wait_for_end(page)
    other = open_window(page, page.url)
    expect(answers(other)).to_contain_text("23")
    ask(page, "What is the capital of France?")
    expect(answers(other)).to_have_count(2)
    questions(other).first.get_by_role("button", name="Edit").click()
    other.keyboard.press("Escape")
    expect(questions(other).first.get_by_label("Version 2 of 2")).to_be_visible()
    questions(other).first.get_by_role("button", name="Previous version").click()
    expect(answers(other)).to_contain_text("42")


def test_name_and_settings_that_are_entered_while_another_tab_goes_on(page):
    ask(page, "17 + 25 = ?")
    other = open_window(page, page.url)
    other.get_by_role("button", name="Conversation settings").click()
    other.get_by_label("System prompt").fill("Be brief.")
    ask(page, "20 + 3 = ?")
    expect(answers(other)).to_have_count(2)
    other.get_by_role("button", name="Save", exact=True).click()
    conversations(other).hover()
    other.get_by_role("button", name="Rename: 17 + 25 = ?").click()
    other.keyboard.type("Su")
    ask(page, "What is the capital of France?")
    expect(answers(other)).to_have_count(3)
    other.keyboard.type("ms\n")
    expect(page.get_by_role("heading", name="Sums")).to_be_visible()
    for tab in (page, other):
        tab.reload()
        expect(answers(tab)).to_have_count(3)
        expect(tab.get_by_role("heading", name="Sums")).to_be_visible()
        assert exported(tab)["conversations"][0]["system"] == "Be brief."


def test_name_and_settings_that_another_tab_enters_in_mid_answer(page):
    choose(page, **LONG)
    send(page, "Count from 3 to 15.")
    expect(answers(page)).to_contain_text("3, 4")
    other = open_window(page, page.url)
    choose(other, max_tokens=5)
    conversations(other).hover()
    other.get_by_role("button", name="Rename: Count from 3 to 15.").click()
    other.keyboard.type("Numbers\n")
    expect(page.get_by_role("heading", name="Numbers")).to_be_visible()
    page.get_by_role("button", name="Stop generating").click()
    wait_for_end(page)
    expect(ask(page, "Count from 4 to 20.")).to_contain_text("5 tokens")
    other.reload()
    expect(other.get_by_role("heading", name="Numbers")).to_be_visible()


def test_settings_of_a_conversation_that_another_tab_removes_are_those_of_no_other(page):
    ask(page, "17 + 25 = ?")
    page.get_by_role("button", name="Conversation settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    other = open_window(page, page.url)
    conversations(other).hover()
    other.get_by_role("button", name="Delete: 17 + 25 = ?").click()
    other.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(conversations(page)).to_have_count(0)
    expect(page.locator("#messages article")).to_have_count(0)
    page.get_by_role("button", name="Save", exact=True).click()
    page.reload()
    page.get_by_role("button", name="Conversation settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("")


def test_who_reads_is_left_alone_while_another_tab_goes_on(page):
    file = long_conversation(40)
    file["conversations"][0]["messages"][1]["content"] = "<think>So be it.</think>Answer 0"
    take_in(page, file)
    expect(answers(page).last).to_contain_text("Answer 39")
    other = open_window(page, page.url)
    expect(answers(other)).to_have_count(40)
    answers(other).first.get_by_text("Reasoning").click()
    thought = answers(other).first.get_by_text("So be it.")
    other.emulate_media(color_scheme="dark")  # as in the evening
    expect(other.locator("html")).to_have_attribute("data-theme", "dark")
    question = {"role": "user", "content": "20 + 3 = ?"}
    choose(page, max_tokens=8, messages=[question])  # all of it would be too long for this model
    expect(other.get_by_role("button", name="Conversation settings")).to_have_class(re.compile("chosen"))
    expect(thought).to_be_in_viewport()
    ask(page, question["content"])
    expect(answers(other).last).to_contain_text("tokens/s")  # all of it is there
    expect(answers(other)).to_have_count(41)
    expect(thought).to_be_in_viewport()


def test_answer_that_another_tab_is_getting(page):
    choose(page, **LONG)
    send(page, "Count from 3 to 15.")
    expect(answers(page).last).to_contain_text("3, 4")
    wait_until_saved(page, "3, 4")
    other = open_window(page, page.url)
    expect(answers(other)).to_contain_text("generated in another tab")
    page.keyboard.press("Escape")
    wait_for_end(page)
    expect(answers(other)).to_contain_text("stopped")
    assert other.locator(".markdown").inner_text() == page.locator(".markdown").inner_text()
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page).last).to_contain_text("3, 4")
    expect(other.get_by_role("img", name="The answer is being generated.")).to_be_visible()
    page.close()
    expect(answers(other)).to_contain_text("closed during the answer")
