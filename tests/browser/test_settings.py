"""Settings of a conversation: its model, system prompt and sampling."""

from __future__ import annotations

import json
import re

import pytest
from axe_findings import findings
from chat_page import answers, ask, choose, dictate, exported, questions, start_new
from playwright.sync_api import expect
from serving import serving


@pytest.fixture(scope="module")
def two_models():
    """A server of two models, for both of which tokens are drafted."""
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
    with serving("--model", "one=demo", "--model", "two=demo-draft", "--speculative-config", drafts) as running:
        yield running


def test_one_of_several_models_is_chosen_for_a_conversation(context, two_models):
    page = context.new_page()
    page.goto(two_models.url)
    model = page.get_by_role("combobox", name="Model")
    expect(model).to_have_value("one")
    model.select_option("two")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "17 + 25 = ?")
    assert asked.value.post_data_json["model"] == "two"
    page.get_by_role("button", name="New chat").click()
    expect(questions(page)).to_have_count(0)
    expect(model).to_have_value("two")
    model.select_option("one")
    ask(page, "20 + 3 = ?")
    page.go_back()
    expect(model).to_have_value("two")
    page.reload()
    expect(model).to_have_value("two")


def test_drafted_tokens_are_tinted_where_the_settings_say_so(context, two_models):
    page = context.new_page()
    page.goto(two_models.url)
    text = "eins zwei 三 vier. " * 6
    dictate(page, text)
    expect(ask(page, "Go.")).to_contain_text("tokens per step")
    expect(page.locator("mark")).to_have_count(0)
    page.get_by_role("button", name="Conversation settings").click()
    page.get_by_label("Underline drafted tokens in answers").check()
    page.get_by_role("button", name="Save", exact=True).click()
    answer = ask(page, "Go.")
    told = answer.inner_text()
    (accepted,) = re.findall(r"(\d+) of \d+ drafted tokens accepted", told)
    assert int(accepted) > 10 and f"{accepted} of " in answer.locator(".drafted summary").inner_text()
    assert answer.locator(".tokens").text_content().startswith(text)
    expect(answer.locator("mark").first).to_have_css("text-decoration-line", "underline")
    page.reload()
    expect(answers(page).last.locator("mark").first).to_have_attribute("title", "drafted and accepted")
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        assert findings(page) == []
    (kept,) = exported(page)["conversations"]
    (pairs,) = [message["drafted"] for message in kept["messages"] if "drafted" in message]
    assert kept["settings"]["return_drafted"] and "".join(piece for piece, _ in pairs).startswith(text)


def test_settings_are_sent_and_kept_with_the_conversation(page):
    page.get_by_role("button", name="Conversation settings").click()
    temperature = page.get_by_label("Temperature")
    expect(temperature).to_have_attribute("placeholder", "default: 0.3")
    temperature.fill("0")
    page.get_by_label("Max tokens").fill("5")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Max tokens").press("Enter")
    with page.expect_request("**/v1/chat/completions") as asked:
        answer = ask(page, "Count from 3 to 15.")
    body = asked.value.post_data_json
    assert body["temperature"] == 0 and body["max_tokens"] == 5
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    expect(answer).to_contain_text("cut off")
    expect(answer).to_contain_text("5 tokens")
    page.reload()
    page.get_by_role("button", name="Conversation settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(page.get_by_label("Max tokens")).to_have_value("5")


def test_settings_are_those_of_the_conversation_that_they_were_opened_for(page):
    ask(page, "17 + 25 = ?")
    start_new(page)
    ask(page, "20 + 3 = ?")
    page.get_by_role("button", name="Conversation settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.go_back()
    expect(page.locator("#title")).to_have_text("17 + 25 = ?")
    page.get_by_role("button", name="Save", exact=True).click()
    systems = {one["title"]: one["system"] for one in exported(page)["conversations"]}
    assert systems == {"17 + 25 = ?": "", "20 + 3 = ?": "Be brief."}


def test_settings_of_a_conversation_that_has_not_begun_survive_a_reload(page):
    page.get_by_role("button", name="Conversation settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Save", exact=True).click()
    page.reload()
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "17 + 25 = ?")
    assert asked.value.post_data_json["messages"][0] == {"role": "system", "content": "Be brief."}
    page.get_by_role("button", name="New chat").click()  # which is another one
    expect(answers(page)).to_have_count(0)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "20 + 3 = ?")
    assert asked.value.post_data_json["messages"][0]["role"] == "user"


def test_settings_that_mean_nothing_are_not_taken(page):
    page.get_by_role("button", name="Conversation settings").click()
    page.get_by_label("Additional request fields").fill("[1]")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("not a JSON object")


def test_what_the_server_refuses_is_told_in_its_words(page):
    choose(page, temperature=-1)
    answer = ask(page, "17 + 25 = ?")
    expect(answer).to_contain_text("temperature")
