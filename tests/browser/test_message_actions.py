"""What is done with messages that are there: continue, edit, delete, fork; and the context that they fill."""

from __future__ import annotations

import os
import signal

import pytest
from chat_page import (
    answers,
    ask,
    choose,
    conversations,
    exported,
    questions,
    send,
    start_new,
    take_in,
    wait_for_end,
)
from playwright.sync_api import expect

LONG_TURN = "Please keep this in mind: " + " ".join(str(number) for number in range(150, 390))


def test_answer_that_was_cut_off_is_gone_on_with_where_it_ends(page):
    choose(page, temperature=0, max_tokens=12)
    answer = ask(page, "Count from 3 to 15.")
    expect(answer).to_contain_text("cut off at the token limit")
    before = answer.locator(".markdown").inner_text()
    with page.expect_request("**/v1/chat/completions") as asked:
        answer.get_by_role("button", name="Continue").click()
    body = asked.value.post_data_json
    assert body["continue_final_message"] and body["messages"][-1]["content"].rstrip() == before
    wait_for_end(page)
    expect(answers(page)).to_have_count(1)
    expect(answer).to_contain_text("24 tokens")
    assert answer.locator(".markdown").inner_text().startswith(before)
    choose(page, temperature=0)
    answer.get_by_role("button", name="Continue").click()
    wait_for_end(page)
    assert answer.locator(".markdown").inner_text() == ", ".join(str(number) for number in range(3, 16))
    expect(answer.get_by_role("button", name="Continue")).to_be_hidden()


def test_answer_can_be_edited_and_is_sent_as_it_reads_then(page):
    choose(page, temperature=0)
    ask(page, "My name is Alice Young.")
    answers(page).get_by_role("button", name="Edit answer").click()
    page.get_by_label("Edit answer").fill("Hello, Alice Young!")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(answers(page)).to_contain_text("Hello, Alice Young!")
    expect(answers(page)).to_contain_text("edited")
    expect(answers(page).get_by_label("Version 2 of 2")).to_be_visible()
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "What is my name?")
    assert asked.value.post_data_json["messages"][1]["content"] == "Hello, Alice Young!"

    # From any answer on, another conversation can be begun.
    answers(page).first.get_by_role("button", name="Branch").click()
    expect(conversations(page)).to_have_text(["My name is Alice Young. (branch)", "My name is Alice Young."])
    expect(questions(page)).to_have_count(1)
    expect(ask(page, "What is my name?")).to_contain_text("Alice Young")
    conversations(page).nth(1).click()
    expect(questions(page)).to_have_count(2)


def test_message_is_deleted_with_what_follows_it(page):
    ask(page, "17 + 25 = ?")
    ask(page, "20 + 3 = ?")
    ask(page, "What is the capital of France?")
    answers(page).nth(1).get_by_role("button", name="Delete message").click()
    expect(page.get_by_role("dialog")).to_contain_text("the 2 after it")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(questions(page)).to_have_count(2)
    expect(answers(page)).to_have_count(1)
    page.reload()
    expect(questions(page)).to_have_count(2)
    questions(page).last.get_by_role("button", name="Regenerate").click()  # there is no dead end
    wait_for_end(page)
    expect(answers(page).last).to_contain_text("23")
    assert len(exported(page)["conversations"][0]["messages"]) == 4
    questions(page).first.get_by_role("button", name="Delete message").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(questions(page)).to_have_count(0)
    expect(conversations(page)).to_have_count(0)


def filled(used: int) -> dict:
    """A conversation of three turns whose last answer told of so many tokens."""
    messages = []
    for number, text in enumerate(["My name is Alice Young.", LONG_TURN, "17 + 25 = ?"]):
        parent = messages[-1]["id"] if messages else None
        question = {"id": f"q{number}", "parent": parent, "role": "user", "content": text, "created": 2 * number}
        answer = {"id": f"a{number}", "parent": f"q{number}", "role": "assistant", "content": f"Answer {number}."}
        messages += [question, answer | {"created": 2 * number + 1, "status": "done"}]
    messages[-1]["usage"] = {
        "prompt_tokens": used - 5,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    whole = {"title": "Full", "leaf": "a2", "messages": messages, "settings": {"temperature": 0}}
    return {"format": "labinfer-conversations", "version": 1, "conversations": [whole]}


def test_full_context_is_told_and_its_oldest_part_can_be_left_out_or_summarised(page):
    context = page.locator("#context")
    take_in(page, filled(1400))  # 68 %
    expect(questions(page)).to_have_count(3)
    expect(context).to_be_hidden()
    cut = filled(1600)
    *_, question, answer = cut["conversations"][0]["messages"]
    question["begins"], answer["from"] = {"summary": ""}, question["id"]
    take_in(page, cut)
    expect(context).to_contain_text("78 % full")
    take_in(page, filled(1500))
    expect(context).to_contain_text("73 % full: 1500 of 2048 tokens")
    context.get_by_role("button", name="Drop oldest messages").click()
    expect(context).to_be_hidden()  # until an answer tells
    expect(questions(page).last).to_contain_text("no longer sent to the model")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "20 + 3 = ?")
    assert [message["content"] for message in asked.value.post_data_json["messages"]] == [
        "17 + 25 = ?",
        "Answer 2.",
        "20 + 3 = ?",
    ]
    page.reload()
    questions(page).nth(2).get_by_role("button", name="Send in full again").click()
    expect(questions(page).nth(2)).not_to_contain_text("no longer sent")
    expect(context).to_contain_text("73 %")
    context.get_by_role("button", name="Summarize oldest messages").click()
    expect(page.get_by_text("are sent to the model as a summary")).to_be_visible(timeout=60_000)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "20 + 3 = ?")
    first, *others = asked.value.post_data_json["messages"]
    assert first["role"] == "system" and first["content"].startswith("Summary of the conversation so far:\n")
    assert len(others) == 5


def test_conversation_that_no_longer_fits_is_no_dead_end(page):
    choose(page, temperature=0)
    ask(page, "17 + 25 = ?")
    send(page, " ".join(str(number) for number in range(1000)))
    expect(answers(page).last).to_contain_text("exceeds the model's context length")
    expect(page.locator("#context")).to_contain_text("exceeds the context length of 2048 tokens")
    page.get_by_role("button", name="Drop oldest messages").click()
    wait_for_end(page)
    expect(page.locator("#context")).to_contain_text("no older messages to drop")
    start_new(page)
    expect(page.locator("#context")).to_be_hidden()


@pytest.mark.slow
def test_rank_that_stands_still_is_named(page, server):
    choose(page, ignore_eos=True, max_tokens=50_000)
    send(page, "Count from 3 to 15.")
    expect(answers(page).last).to_contain_text("3, 4")
    os.kill(server.rank_pid(1), signal.SIGSTOP)
    expect(page.locator("#banner")).to_contain_text("rank 0 waits for rank 1 in step", timeout=20_000)
    os.kill(server.rank_pid(1), signal.SIGCONT)
    expect(page.locator("#banner")).to_be_hidden()
    page.keyboard.press("Escape")
