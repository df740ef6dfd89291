"""Several conversations: switching, searching, names, removal, files, reloads, long ones."""

from __future__ import annotations

import json
import time

import pytest
from chat_page import (
    LONG,
    answers,
    ask,
    choose,
    conversations,
    exported,
    long_conversation,
    questions,
    send,
    start_new,
    take_in,
    wait_for_end,
    wait_until_saved,
)
from playwright.sync_api import expect

FRAMES = """async () => {
    const times = [];
    for (let last = performance.now(), end = last + 1500; last < end;) {
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        times.push(now - last);
        last = now;
    }
    times.sort((a, b) => a - b);
    return [times[Math.floor(times.length / 2)], times.at(-1)];
}"""
"""The median and the longest time between two frames in a second and a half, in ms."""
STALLS_AFTER_TWO_PIECES = """() => {
    const { fetch } = window;
    const piece = (content) => `data: ${JSON.stringify({ model: "demo", choices: [{ index: 0, delta: { content } }] })}\\n\\n`;
    const stalled = new ReadableStream({
        start(stream) {
            stream.enqueue(new TextEncoder().encode(piece("3")));
            setTimeout(() => stream.enqueue(new TextEncoder().encode(piece(", 4, 5"))), 100);
        },
    });
    const answer = new Response(stalled, { headers: { "Content-Type": "text/event-stream" } });
    window.fetch = async (url, options) => (String(url).includes("chat/completions") ? answer : fetch(url, options));
}"""
"""From then on, an answer is two pieces that come together, and no end."""


def test_conversations_are_kept_apart_and_can_be_switched(page):
    ask(page, "17 + 25 = ?")
    start_new(page)
    ask(page, "What is the capital of France?")
    expect(conversations(page)).to_have_text(["What is the capital of France?", "17 + 25 = ?"])
    conversations(page).nth(1).click()
    expect(answers(page)).to_contain_text("42")
    page.go_back()
    expect(answers(page)).to_contain_text("Paris")


def test_answer_goes_on_while_another_conversation_is_read(page):
    ask(page, "17 + 25 = ?")
    start_new(page)
    choose(page, **LONG | {"max_tokens": 400})
    send(page, "Count from 3 to 15.")
    expect(answers(page).last).to_contain_text("3, 4")
    conversations(page).nth(1).click()
    expect(answers(page)).to_contain_text("42")
    conversations(page).nth(0).click()
    wait_for_end(page)
    expect(answers(page)).to_contain_text("400 tokens")


def test_search_goes_through_titles_and_messages(page):
    ask(page, "What is the capital of France?")
    start_new(page)
    ask(page, "17 + 25 = ?")
    search = page.get_by_role("searchbox", name="Search all messages")
    search.fill("paris")  # in an answer
    expect(conversations(page)).to_have_text(["What is the capital of France?"])
    search.fill("no such words")
    expect(page.get_by_text("No results.")).to_be_visible()
    search.dispatch_event("keydown", {"key": "Escape"})  # in a browser that does nothing of its own
    expect(search).to_have_value("")
    expect(conversations(page)).to_have_count(2)
    search.fill("paris")
    expect(conversations(page)).to_have_count(1)
    start_new(page)  # what is written now is listed
    expect(search).to_have_value("")
    expect(conversations(page)).to_have_count(2)


def test_rename_and_delete(page):
    ask(page, "17 + 25 = ?")
    conversations(page).hover()
    page.get_by_role("button", name="Rename: 17 + 25 = ?").click()
    page.get_by_role("textbox", name="Rename").fill("Sums")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Sums")).to_be_visible()
    page.reload()
    expect(conversations(page)).to_have_text(["Sums"])
    conversations(page).hover()
    page.get_by_role("button", name="Delete: Sums").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(conversations(page)).to_have_count(0)
    expect(questions(page)).to_have_count(0)
    page.reload()
    expect(conversations(page)).to_have_count(0)


def test_answer_that_ends_leaves_a_name_alone_that_is_being_written(page):
    ask(page, "17 + 25 = ?")
    send(page, "Count from 3 to 15.")
    conversations(page).hover()
    page.get_by_role("button", name="Rename: 17 + 25 = ?").click()
    page.keyboard.type("Su")
    wait_for_end(page)
    page.keyboard.type("ms\n")
    expect(page.get_by_role("heading", name="Sums")).to_be_visible()


def test_conversation_can_be_deleted_in_mid_answer(page, server):
    choose(page, **LONG)
    send(page, "Count from 3 to 15.")
    expect(answers(page).last).to_contain_text("3, 4")
    conversations(page).hover()
    page.get_by_role("button", name="Delete: Count").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(conversations(page)).to_have_count(0)
    server.wait_idle(3)
    assert exported(page)["conversations"] == []
    left = page.evaluate(
        """async () => {
            const { Store } = await import("/webui/store.js");
            let count = 0;
            await (await Store.open()).everyMessage(() => count++);
            return count;
        }"""
    )
    assert left == 0


def test_file_can_be_imported_in_mid_answer(page):
    choose(page, **LONG)
    send(page, "Count from 3 to 15.")
    expect(answers(page).last).to_contain_text("3, 4")
    take_in(page, long_conversation(1))
    expect(answers(page)).to_contain_text("Answer 0")
    conversations(page).filter(has_text="Count from").click()
    expect(questions(page)).to_have_text("Count from 3 to 15.")  # before that Escape stops nothing
    page.keyboard.press("Escape")
    wait_for_end(page)
    choose(page, temperature=0)
    ask(page, "17 + 25 = ?")
    expect(conversations(page)).to_have_count(2)


def test_what_is_exported_can_be_imported_with_all_versions(page):
    ask(page, "17 + 25 = ?")
    answers(page).get_by_role("button", name="Regenerate").click()
    wait_for_end(page)
    file = exported(page)
    assert len(file["conversations"][0]["messages"]) == 3
    take_in(page, file)
    expect(conversations(page)).to_have_text(["17 + 25 = ?"] * 2)
    expect(answers(page).get_by_label("Version 2 of 2")).to_be_visible()
    expect(ask(page, "20 + 3 = ?")).to_contain_text("23")


def test_one_conversation_can_be_exported(page):
    ask(page, "17 + 25 = ?")
    start_new(page)
    ask(page, "20 + 3 = ?")
    conversations(page).nth(1).hover()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export: 17 + 25 = ?").click()
    (one,) = json.loads(download.value.path().read_text(encoding="utf-8"))["conversations"]
    assert [message["content"] for message in one["messages"] if message["role"] == "user"] == ["17 + 25 = ?"]


def test_open_conversation_is_in_view_in_a_long_list(page):
    many = [long_conversation(1)["conversations"][0] | {"title": f"Number {number}"} for number in range(100)]
    take_in(page, long_conversation(1) | {"conversations": many})
    expect(conversations(page)).to_have_count(100)
    conversations(page).last.click()
    page.reload()
    expect(conversations(page)).to_have_count(100)
    expect(page.locator("#conversations [aria-current]")).to_be_in_viewport()


def test_file_that_is_none_of_ours_is_refused(page):
    circle = long_conversation(1)
    circle["conversations"][0]["messages"][0]["parent"] = "a0"
    for wrong in ("{}", "no JSON", json.dumps(circle)):
        take_in(page, wrong)
        expect(page.get_by_role("dialog")).to_contain_text("Import failed")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_have_count(0)
    expect(conversations(page)).to_have_count(0)


def test_what_of_a_file_has_no_sense_does_no_harm(page):
    file = long_conversation(1)
    whole = file["conversations"][0]
    whole |= {
        "settings": {"stop": "x", "temperature": "hot", "seed": 7, "extra": []},
        "title": 5,
        "__proto__": {"a": 1},
    }
    whole["messages"][1] |= {"stats": {"perSecond": "fast"}, "toolCalls": 7, "logprobs": [{"top": 0}], "usage": "much"}
    take_in(page, file)
    expect(answers(page)).to_contain_text("Answer 0")
    page.get_by_role("button", name="Conversation settings").click()
    expect(page.get_by_label("Seed")).to_have_value("7")
    expect(page.get_by_label("Temperature")).to_have_value("")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(ask(page, "20 + 3 = ?")).to_contain_text("23")


def test_reload_in_mid_answer_keeps_what_had_come_and_frees_the_engine(page, server):
    choose(page, **LONG)
    send(page, "Count from 3 to 15.")
    expect(answers(page).last).to_contain_text("3, 4, 5")
    wait_until_saved(page, "3, 4, 5")
    page.reload()
    expect(answers(page)).to_contain_text("3, 4, 5")
    expect(answers(page)).to_contain_text("The page was closed during the answer.")
    server.wait_idle(5)
    answers(page).get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("button", name="Stop generating")).to_be_visible()
    page.keyboard.press("Escape")
    wait_for_end(page)


def test_conversations_of_a_store_without_attachments_are_kept(page):
    found = page.evaluate(
        """async () => {
            const { Store } = await import("/webui/store.js");
            const old = indexedDB.open("old", 1);
            old.onupgradeneeded = () => {
                old.result.createObjectStore("conversations", { keyPath: "id" }).put({ id: "a", updated: 1 });
                old.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
            };
            await new Promise((resolve) => (old.onsuccess = resolve));
            old.result.close();
            const store = await Store.open("old");
            await store.keepAttachments("a", [{ name: "file", text: "text" }]);
            return [(await store.conversations()).map(({ id }) => id), await store.attachments("a")];
        }"""
    )
    assert found == [["a"], [{"name": "file", "text": "text"}]]


def test_all_that_came_before_a_stall_is_saved(page):
    page.evaluate(STALLS_AFTER_TWO_PIECES)
    send(page, "Count from 3 to 15.")
    expect(answers(page).last).to_contain_text("3, 4, 5")
    wait_until_saved(page, "3, 4, 5")
    page.reload()
    expect(answers(page)).to_contain_text("3, 4, 5")


@pytest.mark.timing
def test_200_messages_do_not_make_the_page_slow(page):
    take_in(page, long_conversation(100))
    expect(answers(page).last).to_contain_text("Answer 99")
    expect(page.get_by_role("article")).to_have_count(200)
    begin = time.monotonic()
    start_new(page)
    conversations(page).first.click()
    expect(answers(page).last).to_be_in_viewport()
    assert time.monotonic() - begin < 2
    expect(page.get_by_role("article")).to_have_count(200)
    question = {"role": "user", "content": "Count from 3 to 15."}
    choose(page, **LONG, messages=[question])  # all of it would be too long for this model
    send(page, question["content"])
    expect(answers(page).last).to_contain_text("3, 4")
    median, longest = page.evaluate(FRAMES)
    expect(page.get_by_role("button", name="Stop generating")).to_be_visible()
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert median < 40 and longest < 500, f"{median:.0f} ms between two frames, {longest:.0f} at most"


def test_disk_that_is_full_in_mid_answer_is_told(page):
    ask(page, "17 + 25 = ?")
    page.evaluate(
        "() => { IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }; }"
    )
    ask(page, "20 + 3 = ?")
    expect(page.get_by_text("cannot store conversations")).to_be_visible()


def test_browser_that_keeps_nothing_says_so_and_works(browser, server):
    context = browser.new_context(locale="en-US")
    context.add_init_script(
        "Object.defineProperty(window, 'indexedDB', { get() { throw new DOMException('no', 'SecurityError'); } })"
    )
    page = context.new_page()
    page.goto(server.url)
    expect(page.get_by_text("cannot store conversations")).to_be_visible()
    expect(ask(page, "17 + 25 = ?")).to_contain_text("42")
    start_new(page)
    ask(page, "20 + 3 = ?")
    conversations(page).nth(1).click()
    expect(answers(page)).to_contain_text("42")
    page.get_by_role("searchbox").fill("42")
    expect(conversations(page)).to_have_count(1)
    context.close()
