"""Asking and answering: send, stop, edit, answer again, versions, drafts."""

from __future__ import annotations

import json
import re

from chat_page import (
    LONG,
    answers,
    ask,
    choose,
    conversations,
    dictate,
    long_conversation,
    questions,
    send,
    start_new,
    take_in,
    wait_for_end,
)
from playwright.sync_api import expect
from serving import wait_for

STILL = """async (one) => {
    for (let last = -1, frames = 0; frames < 10; frames = one.scrollTop === last ? frames + 1 : 0) {
        last = one.scrollTop;
        await new Promise(requestAnimationFrame);
    }
    return [one.scrollTop, one.scrollHeight];
}"""
"""Where it is scrolled to, once it has come to rest, and how long it is."""


def test_answer_comes_with_its_figures(page):
    answer = ask(page, "17 + 25 = ?")
    expect(answer).to_contain_text("42")
    for figure in ("tokens", "tokens/s", "TTFT", "complete"):
        expect(answer).to_contain_text(figure)
    expect(page.get_by_role("heading", name="17 + 25 = ?")).to_be_visible()
    expect(page.get_by_role("textbox", name="Write a message")).to_be_focused()


def test_rate_is_none_of_tokens_that_came_in_one_piece(page):
    """The stream of a short answer: all of it is read at once, 50 ms after it was asked for."""
    stats = page.evaluate(
        """async () => {
            const { Answering } = await import("/webui/answering.js");
            const { Conversation, newRecord } = await import("/webui/conversation.js");
            const conversation = new Conversation(newRecord());
            const message = conversation.add("assistant", conversation.add("user", null, { content: "x" }).id);
            const api = { async *chat() {
                await new Promise((resolve) => setTimeout(resolve, 50));
                for (const content of ["a", "b", "c", "d"]) yield { choices: [{ delta: { content } }] };
            } };
            await new Answering(api, null, { saveMessage: async () => {} }, conversation, message).run();
            return message.stats;
        }"""
    )
    assert stats["tokens"] == 4 and 10 < stats["perSecond"] <= 4 / 0.049


def test_earlier_messages_are_sent_and_found_in_the_cache(page):
    ask(page, "My name is Alice Young.")
    answer = ask(page, "What is my name?")
    expect(answer).to_contain_text("Alice Young")
    expect(answer).to_contain_text("prompt tokens cached")


def test_stop_ends_the_answer_in_the_engine(page, server):
    choose(page, **LONG)
    send(page, "Count from 3 to 15.")
    expect(answers(page).last).to_contain_text("3, 4")
    with page.expect_response("**/v1/requests/*/cancel"):
        page.keyboard.press("Escape")
    wait_for_end(page)
    expect(answers(page).last).to_contain_text("stopped")
    expect(answers(page).last).to_contain_text("about")
    server.wait_idle(3)
    choose(page, temperature=0)
    expect(ask(page, "17 + 25 = ?")).to_contain_text("complete")  # and the conversation goes on


def test_enter_that_chooses_a_word_of_an_input_method_sends_nothing(page):
    box = page.get_by_role("textbox", name="Write a message")
    box.fill("ni hao")
    box.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    box.dispatch_event("keydown", {"key": "Enter", "keyCode": 229})
    expect(box).to_have_value("ni hao")
    expect(questions(page)).to_have_count(0)
    page.keyboard.press("Shift+Enter")
    expect(box).to_have_value("ni hao\n")
    page.keyboard.press("Enter")
    expect(questions(page)).to_have_count(1)
    wait_for_end(page)


def test_only_an_escape_that_means_nothing_else_stops_an_answer(page):
    choose(page, **LONG)
    send(page, "Count from 3 to 15.")
    expect(answers(page)).to_contain_text("3, 4")
    stop = page.get_by_role("button", name="Stop generating")
    box = page.get_by_role("textbox", name="Write a message")
    box.dispatch_event("keydown", {"key": "Escape", "isComposing": True})  # gives up a word of an input method
    box.dispatch_event("keydown", {"key": "Escape", "keyCode": 229})
    search = page.get_by_role("searchbox")
    search.fill("nothing")
    search.press("Escape")
    expect(search).to_have_value("")
    before = len(answers(page).inner_text())
    wait_for(lambda: len(answers(page).inner_text()) > before, 15)  # it goes on
    expect(stop).to_be_visible()
    page.keyboard.press("Escape")
    expect(stop).to_be_hidden()


def test_edited_message_has_versions_with_their_own_answers(page):
    ask(page, "17 + 25 = ?")
    ask(page, "What is the capital of France?")
    questions(page).first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("20 + 3 = ?")
    page.keyboard.press("Enter")
    wait_for_end(page)
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_contain_text("23")
    expect(questions(page).get_by_label("Version 2 of 2")).to_be_visible()
    questions(page).get_by_role("button", name="Previous version").click()
    expect(answers(page)).to_have_count(2)
    expect(answers(page).first).to_contain_text("42")
    page.reload()
    expect(answers(page)).to_have_count(2)  # the choice is kept
    questions(page).first.get_by_role("button", name="Next version").click()
    expect(answers(page)).to_contain_text("23")


def test_answer_again_is_a_version_of_the_answer(page):
    ask(page, "17 + 25 = ?")
    answers(page).get_by_role("button", name="Regenerate").click()
    wait_for_end(page)
    expect(answers(page)).to_have_count(1)
    expect(answers(page).get_by_label("Version 2 of 2")).to_be_visible()
    expect(questions(page)).to_have_count(1)


def test_what_is_asked_for_in_mid_answer_takes_its_place(page, server):
    choose(page, **LONG)
    send(page, "Count from 3 to 15.")
    expect(answers(page)).to_contain_text("3, 4")
    questions(page).get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("Count from 4 to 20.")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("4, 5")
    expect(questions(page).get_by_label("Version 2 of 2")).to_be_visible()
    questions(page).get_by_role("button", name="Previous version").click()  # to look at it only
    expect(answers(page)).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Stop generating")).to_be_visible()
    answers(page).get_by_role("button", name="Regenerate").click()
    expect(answers(page).get_by_label("Version 2 of 2")).to_be_hidden()  # while it is written
    expect(answers(page)).to_contain_text("3, 4")
    questions(page).get_by_role("button", name="Next version").click()
    expect(answers(page)).to_contain_text("stopped")
    questions(page).get_by_role("button", name="Previous version").click()
    before = len(answers(page).inner_text())
    wait_for(lambda: len(answers(page).inner_text()) > before, 15)  # it goes on
    page.keyboard.press("Escape")
    wait_for_end(page)
    expect(answers(page).get_by_label("Version 2 of 2")).to_be_visible()
    server.wait_idle(3)


def test_of_two_wishes_in_mid_answer_only_the_last_is_answered(page, server):
    choose(page, **LONG)
    send(page, "Count from 3 to 15.")
    expect(answers(page)).to_contain_text("3, 4")
    questions(page).get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("Count from 4 to 20.")
    page.locator(".editing .primary").evaluate("(button) => { button.click(); button.click(); }")
    expect(answers(page)).to_contain_text("4, 5")
    expect(questions(page).get_by_label("Version 2 of 2")).to_be_visible()
    page.locator("#stop").evaluate("(button) => button.click()")
    wait_for_end(page)
    server.wait_idle(3)


def test_who_scrolls_up_is_not_taken_back(page):
    page.set_viewport_size({"width": 1280, "height": 400})
    until_stopped = {"max_tokens": 50_000, "min_tokens": 50_000}
    choose(page, **until_stopped, structured_outputs={"regex": r"(A paragraph of a long answer\.\n\n)+"})
    send(page, "Go.")
    thread = page.locator("#thread")
    wait_for(lambda: thread.evaluate("(one) => one.scrollTop") > 300, 15)
    page.mouse.move(700, 150)
    page.mouse.wheel(0, -30)  # the least a hand does
    expect(page.get_by_role("button", name="Scroll to the end")).to_be_visible()
    place, height = thread.evaluate(STILL)
    wait_for(lambda: thread.evaluate("(one) => one.scrollHeight") > height + 200, 15)
    assert thread.evaluate("(one) => one.scrollTop") == place
    page.get_by_role("button", name="Scroll to the end").click()
    expect(thread).to_be_focused()
    wait_for(lambda: thread.evaluate("(one) => one.scrollTop") > place + 600, 15)  # it follows again
    page.keyboard.press("Escape")
    wait_for_end(page)


def test_scroll_up_counts_though_the_answer_grows_in_the_same_moment(page):
    page.set_viewport_size({"width": 1280, "height": 400})
    dictate(page, "A paragraph.\n\n" * 12)
    ask(page, "Go.")
    expect(page.get_by_role("button", name="Scroll to the end")).to_be_hidden()
    page.locator("#messages").evaluate(
        """(list) => new Promise((resolve) => {
            let calls = 0;
            new ResizeObserver((_, observer) => {
                calls += 1;
                if (calls === 1) { // nothing has grown yet
                    const more = document.createElement("div");
                    more.style.height = "60px";
                    list.append(more);
                    return;
                }
                document.getElementById("thread").scrollTop -= 30; // the page has followed by now, and was not told of it
                observer.disconnect();
                resolve();
            }).observe(list);
        })"""
    )
    expect(page.get_by_role("button", name="Scroll to the end")).to_be_visible()


def test_edit_survives_a_reload_until_it_is_given_up(page):
    ask(page, "17 + 25 = ?")
    questions(page).get_by_role("button", name="Edit").click()
    editor = page.get_by_label("Edit message")
    editor.fill("20 + 3")
    page.reload()
    expect(editor).to_have_value("20 + 3")
    start_new(page)
    page.go_back()
    expect(editor).to_have_value("20 + 3")
    editor.press("Escape")
    expect(questions(page)).to_contain_text("17 + 25 = ?")
    page.reload()
    expect(answers(page)).to_contain_text("42")
    expect(editor).to_have_count(0)
    questions(page).get_by_role("button", name="Edit").click()
    editor.fill("20 + 3 = ?")
    editor.press("Enter")
    wait_for_end(page)
    page.reload()
    expect(answers(page)).to_contain_text("23")
    questions(page).get_by_role("button", name="Previous version").click()
    expect(answers(page)).to_contain_text("42")
    expect(editor).to_have_count(0)


def test_draft_survives_a_reload_and_belongs_to_its_conversation(page):
    ask(page, "17 + 25 = ?")
    box = page.get_by_role("textbox", name="Write a message")
    box.fill("half a thought")
    page.reload()
    expect(box).to_have_value("half a thought")
    page.get_by_role("button", name="New chat").click()
    expect(box).to_have_value("")
    page.go_back()
    expect(box).to_have_value("half a thought")


def test_thoughts_are_folded_and_not_sent_back(page):
    dictate(page, "<think>Add the ones, carry one.</think>The sum is 42.")
    answer = ask(page, "17 + 25 = ?")
    thoughts = answer.get_by_text("Add the ones")
    expect(answer).to_contain_text("The sum is 42.")
    expect(answer).not_to_contain_text("<think>")
    expect(thoughts).to_be_hidden()
    expect(answer.locator(".thinking summary")).to_have_text(re.compile(r"^Reasoning · \d+(\.\d)? m?s$"))
    answer.get_by_text("Reasoning").click()
    expect(thoughts).to_be_visible()
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "Sure?")
    assert asked.value.post_data_json["messages"][1] == {"role": "assistant", "content": "The sum is 42."}
    page.reload()
    expect(answers(page).first.locator(".thinking summary")).to_have_text(re.compile("^Reasoning · "))
    expect(answers(page).first.get_by_text("Add the ones")).to_be_hidden()


def test_thoughts_without_an_answer_are_shown(page):
    dictate(page, "<think>Add the ones, carry one.")
    answer = ask(page, "17 + 25 = ?")
    answer.get_by_text("Reasoning").click()
    expect(answer.get_by_text("Add the ones, carry one.")).to_be_visible()


def test_thoughts_in_conversations_of_old_are_folded_too(page):
    conversation = long_conversation(1)
    conversation["conversations"][0]["messages"][1]["content"] = "<think>Add the ones.</think>The sum is 42."
    take_in(page, conversation)
    conversations(page).first.click()
    expect(answers(page)).to_contain_text("The sum is 42.")
    expect(answers(page).get_by_text("Add the ones.")).to_be_hidden()
    expect(answers(page).locator(".thinking summary")).to_have_text("Reasoning")


def test_thoughts_that_were_unfolded_stay_so(page):
    dictate(page, "<think>Add the ones.</think>" + "The sum is 42. " * 40)
    send(page, "17 + 25 = ?")
    answers(page).get_by_text("Reasoning").click()
    wait_for_end(page)
    expect(answers(page)).to_contain_text("complete")
    expect(answers(page).get_by_text("Add the ones")).to_be_visible()


def test_what_is_selected_stays_so_when_the_answer_ends(page):
    dictate(page, "See [this].\n\n" + "The sum is 42.\n\n" * 40 + "[this]: https://example.com/x")
    send(page, "17 + 25 = ?")
    block = answers(page).locator("p").nth(1)
    expect(answers(page).locator("p").nth(3)).to_be_visible()
    block.evaluate("(one) => getSelection().selectAllChildren(one)")
    wait_for_end(page)
    expect(answers(page)).to_contain_text("complete")
    assert page.evaluate("getSelection().toString()") == "The sum is 42."
    expect(answers(page).get_by_role("link", name="this")).to_be_visible()  # which only its end makes a link


def test_tool_calls_are_shown(page):
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    function = {"name": "get_weather", "parameters": parameters | {"additionalProperties": False}}
    choose(page, tools=[{"type": "function", "function": function}], tool_choice="required")
    answer = ask(page, "How is the weather in Paris?")
    expect(answer).to_contain_text("Tool call: get_weather")
    expect(answer).to_contain_text('"city": "Paris"')
    expect(answer).to_contain_text("tool call")


def test_probabilities_of_tokens_are_told_when_asked_for(page):
    page.get_by_role("button", name="Conversation settings").click()
    page.get_by_label("Logprobs").select_option(label="Top 3")
    page.get_by_role("button", name="Save", exact=True).click()
    answer = ask(page, "17 + 25 = ?")
    answer.get_by_role("button", name="Token probabilities").click()
    answer.locator(".token").first.hover()
    expect(answer.locator(".tip dd")).to_have_count(3)
    answer.get_by_role("group", name="Token probabilities").focus()
    page.keyboard.press("ArrowRight")
    expect(answer.locator(".token").nth(1)).to_have_class("token level-0 pointed")


def test_probabilities_are_in_view_with_their_token(page):
    page.set_viewport_size({"width": 800, "height": 500})
    page.get_by_role("button", name="Conversation settings").click()
    page.get_by_label("Logprobs").select_option(label="Top 3")
    page.get_by_label("Additional request fields").fill(
        json.dumps({"structured_outputs": {"choice": ["A long answer. " * 80]}})
    )
    page.get_by_role("button", name="Save", exact=True).click()
    answer = ask(page, "Go.")
    answer.get_by_role("button", name="Token probabilities").click()
    token, tip = answer.locator(".token").nth(4), answer.locator(".tip dl")
    token.scroll_into_view_if_needed()
    token.hover()
    expect(tip).to_be_in_viewport(ratio=1)
    answer.get_by_role("group", name="Token probabilities").evaluate(
        """(group) => {
            const key = { key: "ArrowRight", bubbles: true };
            for (let n = 0; n < 150; n++) group.dispatchEvent(new KeyboardEvent("keydown", key));
        }"""
    )
    pointed = answer.locator(".pointed")
    expect(pointed).to_be_in_viewport(ratio=1)
    expect(tip).to_be_in_viewport(ratio=1)
    assert pointed.bounding_box()["y"] + pointed.bounding_box()["height"] <= tip.bounding_box()["y"]
