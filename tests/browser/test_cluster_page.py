"""The cluster page in front of a real server: ranks, traffic, steps, trace, trouble, languages and telephones."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time

import pytest
from axe_findings import findings
from chat_page import ask
from chromium import watched
from cluster_page import details, hide, picture
from launchers import kill_tree
from playwright.sync_api import expect
from serving import Stream, serving


@pytest.fixture
def cluster(context, server):
    """The cluster page."""
    with watched(context, server) as page:
        page.goto(server.url + "/cluster")
        expect(page.locator("#ranks tbody tr")).to_have_count(2)
        yield page


@pytest.fixture
def traffic(server):
    """Two requests at any time, as long as the test lasts."""
    over = threading.Event()

    def ask_again_and_again(number: int) -> None:
        for i in itertools.count():
            stream = server.stream({"prompt": f"red blue {number} {i}"})
            while not over.is_set() and "data: [DONE]" not in stream.lines[-2:]:
                time.sleep(0.02)
            stream.hang_up()
            if over.is_set():
                return

    threads = [threading.Thread(target=ask_again_and_again, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join()
    server.wait_idle()


def state(page):
    return page.locator("#state")


def test_ranks_are_shown_and_the_pages_know_each_other(page, server):
    page.get_by_role("link", name="Cluster").click()
    expect(page).to_have_title("Cluster · LABInfer")
    rows = page.locator("#ranks tbody tr")
    expect(rows).to_have_count(2)
    expect(page.locator("#about")).to_contain_text("demo")
    expect(page.locator("#about")).to_contain_text("2 stages2 ranks on 1 host")
    told = server.get("/v1/cluster")[1]["ranks"]
    for row, one in zip(rows.all(), told, strict=True):
        last = one["first_layer"] + one["num_layers"] - 1
        for text in (one["host"], one["device"], one["dtype"], f"{one['first_layer']}–{last}", "MiB"):
            expect(row).to_contain_text(text)
    expect(page.locator("#rows .stage")).to_have_count(2)
    page.get_by_role("link", name="Chat").click()
    expect(page.get_by_role("textbox", name="Write a message")).to_be_visible()


def test_traffic_moves_picture_and_charts(cluster, server):
    expect(state(cluster)).to_have_text("Idle")
    streams = [server.stream({"max_tokens": 50_000}) for _ in range(3)]
    expect(state(cluster)).to_have_text("Live")
    expect(cluster.locator("#overall")).to_have_text(re.compile(r"\d+(\.\d)? %"))
    expect(cluster.locator("#rows .share")).to_have_text([re.compile(r"\d+(\.\d)? % bubble")] * 2)
    expect(cluster.locator("#summary")).to_have_text(re.compile(r", [1-9]\d* steps"))
    charts = cluster.locator("#charts figure")
    expect(charts.nth(4)).to_contain_text("3 running")
    expect(charts.nth(3)).to_have_text(re.compile(r"[1-9]\d+ generated"))
    expect(charts.nth(6).locator(".curve")).to_have_attribute("d", re.compile(r"M.*L"))
    seen = cluster.locator("#summary").text_content()
    expect(cluster.locator("#summary")).not_to_have_text(seen)  # it moves
    cluster.get_by_label("Time span").select_option(label="5 s")
    expect(cluster.locator("#summary")).to_contain_text("5 s from")
    expect(cluster.locator("#bottleneck-says")).to_have_text(re.compile(r"Bottleneck: .*\d "))
    expect(cluster.locator("#links tbody tr")).to_have_text([re.compile(r"iB/s.*iB$")] * 2)
    rows = cluster.locator("#requests tbody tr")
    expect(rows).to_have_text([re.compile(r"[1-9]\d* of max. 50,000Cancel$")] * 3)
    rows.nth(1).get_by_role("button").click()
    expect(rows).to_have_count(2)
    assert streams[1].finish().error["code"] == "request_cancelled"
    for stream in streams:
        stream.hang_up()
    expect(state(cluster)).to_have_text("Idle")
    expect(cluster.locator("#overall")).to_be_visible()  # the last picture stays
    expect(charts.nth(4)).to_contain_text("0 running")


def test_step_of_real_traffic_is_explained(cluster, traffic):
    expect(state(cluster)).to_have_text("Live")
    expect(cluster.locator("#summary")).to_have_text(re.compile(r", \d{2,} steps"))
    picture(cluster).focus()
    cluster.keyboard.press("End")
    for _ in range(20):  # back to one that was no prompt, and is whole
        cluster.keyboard.press("ArrowLeft")
        if details(cluster).locator(".kind").text_content() == "Decode":
            break
    expect(details(cluster).locator(".kind")).to_have_text("Decode")
    expect(details(cluster).get_by_role("table", name="Time per rank").locator("tbody tr")).to_have_count(2)
    sequences = details(cluster).get_by_role("table", name="Sequences of this step").locator("tbody tr")
    expect(sequences.first).to_have_text(re.compile(r"Decode1[\d,]+[0-9a-f]{32}"))
    number = details(cluster).get_by_role("heading").text_content()
    details(cluster).get_by_role("button", name="Next step").click()
    expect(details(cluster).get_by_role("heading")).not_to_have_text(number)
    cluster.get_by_role("button", name="Resume").click()
    expect(details(cluster)).to_be_hidden()
    expect(state(cluster)).to_have_text("Live")


def test_prompts_and_answers_are_told_apart(cluster, server):
    server.complete(prompt="red blue " * 200, max_tokens=20)
    expect(cluster.locator("#summary")).to_have_text(re.compile(r", [1-9]\d* step"))
    expect(state(cluster)).to_have_text("Idle")  # all has come: the table stands still
    cluster.get_by_label("Time span").select_option(label="5 s")
    cluster.get_by_text("Steps in view as a table").click()
    rows = cluster.locator("#steps tbody tr")
    expect(rows.filter(has_text="Prefill")).not_to_have_count(0)
    expect(rows.filter(has_text="Decode")).not_to_have_count(0)


def test_trace_is_a_file_for_perfetto(cluster, traffic):
    expect(state(cluster)).to_have_text("Live")
    expect(cluster.locator("#summary")).to_have_text(re.compile(r", [1-9]\d* steps"))
    with cluster.expect_download() as download:
        cluster.get_by_role("button", name="Trace").press("Enter")
    expect(cluster.get_by_role("button", name="Trace")).to_be_focused()
    assert download.value.suggested_filename == "labinfer-trace.json"
    events = json.loads(download.value.path().read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events if event.get("name") == "run"} == {0, 1}


def test_hidden_page_asks_for_nothing(cluster, traffic):
    expect(state(cluster)).to_have_text("Live")
    asked: list[str] = []
    ended: list[str] = []
    cluster.on("request", lambda request: asked.append(request.url) if "/v1/cluster" in request.url else None)
    cluster.on("requestfailed", lambda request: ended.append(request.url))
    hide(cluster, True)
    expect(state(cluster)).to_have_text("Connecting …")
    cluster.wait_for_timeout(1500)
    assert asked == [] and len(ended) == 1 and "/v1/cluster/events" in ended[0]
    seen = cluster.locator("#summary").text_content()
    hide(cluster, False)
    expect(state(cluster)).to_have_text("Live")
    expect(cluster.locator("#summary")).not_to_have_text(seen)


@pytest.mark.slow
def test_server_that_was_killed_and_is_back(context):
    page = context.new_page()
    with serving("--model", "demo") as first:
        port = first.url.rpartition(":")[2]
        page.goto(first.url + "/cluster")
        expect(page.locator("#ranks tbody tr")).to_have_count(1)
        first.complete(max_tokens=30, ignore_eos=True)
        expect(page.locator("#summary")).to_have_text(re.compile(r", [1-9]\d* step"))
        kill_tree(first.process)
        expect(page.get_by_role("status").filter(has_text="cannot be reached")).to_be_visible()
        expect(state(page)).to_have_text("Disconnected")
        expect(page.locator("#summary")).to_contain_text("step")  # the last picture stays
    with serving("--model", "demo", "--port", port) as second:
        expect(page.locator("#banner")).to_be_hidden(timeout=60_000)
        expect(state(page)).to_have_text("Idle")
        seen = page.locator("#summary").text_content()
        with_traffic(second, page, seen)


def with_traffic(server, page, seen: str) -> None:
    """Requests make the picture another one."""
    stream: Stream = server.stream({}).wait_begun()
    expect(state(page)).to_have_text("Live")
    expect(page.locator("#summary")).not_to_have_text(seen)
    stream.hang_up()


@pytest.mark.slow
def test_key_is_that_of_the_chat_page(context):
    page = context.new_page()
    with serving("--model", "demo", "--api-key", "sesame-open-please") as server:
        page.goto(server.url + "/cluster")
        expect(page.locator("#banner")).to_contain_text("requires an API key")
        page.get_by_role("button", name="Enter API key").click()
        page.get_by_label("API key").fill("not-the-right-key")
        page.keyboard.press("Enter")
        expect(page.locator("#banner")).to_contain_text("rejected this API key")
        expect(page.locator("#ranks tbody tr")).to_have_count(0)
        page.get_by_role("button", name="Enter API key").click()
        page.get_by_label("API key").fill("sesame-open-please")
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.locator("#banner")).to_be_hidden()
        expect(page.locator("#ranks tbody tr")).to_have_count(1)
        with page.expect_download() as download:
            page.get_by_role("button", name="Trace").click()
        assert "traceEvents" in json.loads(download.value.path().read_text(encoding="utf-8"))
        page.get_by_role("link", name="Chat").click()
        page.get_by_role("combobox", name="Model").wait_for()
        expect(ask(page, "17 + 25 = ?")).to_contain_text("42")


@pytest.mark.slow
def test_several_models_can_be_chosen_among(context):
    page = context.new_page()
    with serving("--model", "big=demo", "--model", "small=demo-draft") as server:
        page.goto(server.url + "/cluster")
        expect(page.locator("#about")).to_contain_text("big")
        page.get_by_label("Model").select_option("small")
        expect(page.locator("#about")).to_contain_text("small")
        server.complete(model="small", max_tokens=30, ignore_eos=True)
        expect(page.locator("#summary")).to_have_text(re.compile(r", [1-9]\d* step"))
        page.reload()
        expect(page.locator("#about")).to_contain_text("small")


def test_language_and_theme_are_those_of_the_chat_page(cluster, traffic):
    expect(state(cluster)).to_have_text("Live")
    light = cluster.evaluate("document.getElementById('gantt').toDataURL()")
    cluster.get_by_role("button", name="Pause").click()
    cluster.get_by_role("button", name="Preferences").click()
    cluster.get_by_label("Language").select_option(label="中文")
    cluster.get_by_label("Theme").select_option(label="Dark")
    cluster.get_by_role("button", name="Save", exact=True).click()
    expect(cluster.get_by_role("heading", name="流水线")).to_be_visible()
    expect(state(cluster)).to_have_text("已暂停")
    expect(cluster.locator("#rows .stage").first).to_contain_text("阶段 0")
    expect(cluster.locator("html")).to_have_attribute("data-theme", "dark")
    expect(cluster.locator("html")).to_have_attribute("lang", "zh-CN")
    assert cluster.evaluate("document.getElementById('gantt').toDataURL()") != light
    cluster.get_by_role("link", name="对话").click()
    expect(cluster.get_by_role("heading", name="想问点什么？")).to_be_visible()
    expect(cluster.locator("html")).to_have_attribute("data-theme", "dark")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(cluster, traffic, theme):
    cluster.emulate_media(color_scheme=theme, reduced_motion="reduce")
    expect(cluster.locator("html")).to_have_attribute("data-theme", theme)
    expect(state(cluster)).to_have_text("Live")
    assert findings(cluster) == []
    expect(cluster.locator("#summary")).to_have_text(re.compile(r", [1-9]\d* steps"))
    picture(cluster).focus()
    cluster.keyboard.press("End")
    cluster.get_by_text("Steps in view as a table").click()
    assert findings(cluster) == []
    cluster.get_by_role("button", name="Preferences").click()
    assert findings(cluster) == []


def test_telephone(browser, server, traffic):
    context = browser.new_context(
        locale="en-US", viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, device_scale_factor=2
    )
    page = context.new_page()
    page.goto(server.url + "/cluster")
    expect(page.locator("#summary")).to_have_text(re.compile(r", [1-9]\d* steps"))
    box = picture(page).bounding_box()
    page.get_by_role("button", name="Pause").tap()
    for x in range(20, int(box["width"]), 12):
        picture(page).tap(position={"x": x, "y": 42})
        if details(page).is_visible():
            break
    expect(details(page)).to_contain_text("Step")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert findings(page) == []
    context.close()
