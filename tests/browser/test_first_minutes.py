"""What helps whoever is new: examples, explained settings, presets, files, previews, dates, keys, errors in both languages."""

from __future__ import annotations

import json
import re

from axe_findings import findings
from chat_page import answers, ask, choose, conversations, long_conversation, questions, start_new, take_in
from playwright.sync_api import expect

SETTINGS = "Conversation settings"
PREVIEWED = """```svg
<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><circle id="drawn" r="4"/></svg>
```

```html
<!doctype html><html><head><style>p { color: rgb(1, 2, 3) }</style></head>
<body><p id="said">Hello</p><script>parent.document.title = "reached"; document.body.textContent = "ran"</script></body></html>
```"""
ERRORS = {
    "context_length_exceeded": "超出了模型的上下文长度",
    "model_not_found": "已不再提供此模型",
    "request_timeout": "超过了服务器的时间限制",
    "request_too_large": "超过了服务器的大小限制",
    "engine_failed": "引擎发生故障",
}


def test_example_is_asked_by_a_click(page):
    page.get_by_role("button", name="17 + 25 = ?").click()
    expect(answers(page)).to_contain_text("42")
    start_new(page)
    expect(page.get_by_role("button", name="17 + 25 = ?", exact=True).last).to_be_visible()


def test_settings_are_explained_checked_and_kept_by_name(page):
    page.get_by_role("button", name=SETTINGS).click()
    dialog = page.get_by_role("dialog")
    temperature = dialog.get_by_label("Temperature")
    expect(dialog).to_contain_text("0 is greedy decoding")
    for name, value, why in (
        ("Temperature", "-1", "Temperature: This must be between 0 and 100."),
        ("Top p", "0", "greater than 0 and at most 1"),
        ("Max tokens", "1.5", "integer"),
    ):
        dialog.get_by_label(name).fill(value)
        dialog.get_by_role("button", name="Save", exact=True).click()
        expect(dialog.get_by_role("alert")).to_contain_text(why)
        expect(dialog.get_by_label(name)).to_be_focused()
        dialog.get_by_label(name).fill("")
    expect(dialog.get_by_role("alert")).to_be_empty()
    dialog.get_by_label("System prompt").fill("Be brief.")
    temperature.fill("0")
    dialog.get_by_role("button", name="Save as preset").click()
    dialog.get_by_label("Preset name").fill("Brief")
    page.keyboard.press("Enter")
    expect(dialog.get_by_label("Preset")).to_have_value("Brief")
    temperature.fill("0.5")
    dialog.get_by_label("Use for new conversations, too").check()
    assert findings(page) == []
    dialog.get_by_role("button", name="Save", exact=True).click()
    ask(page, "17 + 25 = ?")
    start_new(page)
    page.get_by_role("button", name=SETTINGS).click()
    expect(temperature).to_have_value("0.5")
    expect(dialog.get_by_label("System prompt")).to_have_value("Be brief.")
    dialog.get_by_label("Preset").select_option("Brief")
    expect(temperature).to_have_value("0")
    dialog.get_by_role("button", name="Delete preset").click()
    expect(dialog.get_by_label("Preset").locator("option")).to_have_text(["None"])


def test_text_files_go_with_a_message(page):
    choose(page, temperature=0)
    chips = page.locator("#attached li")
    files = [
        {"name": "note.txt", "mimeType": "text/plain", "buffer": "My name is Alice Young.".encode("utf-16")},
        {"name": "paper.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.7 ..."},
        {"name": "picture.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x1a\n\x00"},
    ]
    page.locator("#attach-files").set_input_files(files)
    expect(chips).to_have_text(["note.txt"])
    expect(page.locator("#not-attached")).to_contain_text("paper.pdf is a PDF")
    expect(page.locator("#not-attached")).to_contain_text("picture.png is not a text file")
    page.evaluate(
        """() => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File(["a = 1\\n"], "code.py"));
            document.body.dispatchEvent(new DragEvent("dragover", { dataTransfer, bubbles: true, cancelable: true }));
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
        }"""
    )
    expect(chips).to_have_text(["note.txt", "code.py"])
    expect(page.locator("#not-attached")).to_be_hidden()
    page.evaluate(
        """() => {
            const folder = new File([], "papers"), target = document.querySelector("#attach-files");
            folder.arrayBuffer = () => Promise.reject(new DOMException("as of a folder", "NotFoundError"));
            Object.defineProperty(target, "files", { value: [folder], configurable: true });
            target.dispatchEvent(new Event("change"));
            delete target.files;
        }"""
    )
    expect(page.locator("#not-attached")).to_have_text("papers cannot be read; attach text files, not folders.")
    take_in(page, long_conversation(1))
    expect(questions(page)).to_have_count(1)
    expect(chips).to_have_count(0)
    start_new(page)
    expect(chips).to_have_text(["note.txt", "code.py"])
    page.get_by_role("button", name="Remove code.py").click()
    page.reload()
    expect(chips).to_have_text(["note.txt"])
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "What is my name?")
    assert asked.value.post_data_json["messages"][-1]["content"] == (
        "File note.txt:\n\nMy name is Alice Young.\n\nWhat is my name?"
    )
    expect(chips).to_have_count(0)
    questions(page).get_by_text("note.txt").click()
    expect(questions(page).locator("pre")).to_have_text("My name is Alice Young.")
    page.reload()
    expect(questions(page).get_by_text("note.txt")).to_be_visible()
    start_new(page)
    expect(chips).to_have_count(0)


def test_html_and_svg_are_previewed_where_they_reach_nothing(page):
    file = long_conversation(1)
    file["conversations"][0]["messages"][1]["content"] = PREVIEWED
    take_in(page, file)
    answer = answers(page)
    expect(answer.get_by_role("button", name="Preview")).to_have_count(2)
    expect(answer.locator("iframe")).to_have_count(0)
    answer.get_by_role("button", name="Preview").first.click()
    expect(answer.frame_locator("iframe").locator("circle#drawn")).to_be_visible()
    answer.get_by_role("button", name="Preview").first.click()
    answer.get_by_role("button", name="Preview").last.click()
    shown = answer.frame_locator("iframe").locator("#said")
    expect(shown).to_have_text("Hello")
    expect(shown).to_have_css("color", "rgb(1, 2, 3)")
    frame = page.frames[-1]
    assert frame.evaluate("origin") == "null"
    expect(page).to_have_title("A long one · LABInfer")
    assert findings(page) == []
    answer.get_by_role("button", name="Preview").last.click()
    expect(answer.locator("iframe")).to_have_count(0)


def test_sidebar_has_dates_and_can_be_folded_away(page):
    old = long_conversation(1)
    old["conversations"][0] |= {"created": 1_600_000_000_000, "updated": 1_600_000_000_000}
    take_in(page, old)
    expect(conversations(page)).to_have_text(["A long one"])
    start_new(page)
    ask(page, "17 + 25 = ?")
    expect(page.locator("#conversations .day")).to_have_text(["Today", "September 2020"])
    page.get_by_role("button", name="Hide conversations").click()
    expect(page.locator("#sidebar")).to_be_hidden()
    expect(page.get_by_role("button", name="Show conversations")).to_be_focused()
    page.reload()
    expect(page.get_by_role("button", name="Show conversations")).to_be_visible()
    expect(page.locator("#sidebar")).to_be_hidden()
    assert findings(page) == []
    page.keyboard.press("Control+Shift+S")
    expect(conversations(page)).to_have_count(2)


def test_keys_are_listed_and_work(page):
    ask(page, "17 + 25 = ?")
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog")).to_contain_text("Search all messages")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+O")
    expect(questions(page)).to_have_count(0)


def test_errors_and_waits_are_told_in_chinese(page):
    page.evaluate("localStorage['labinfer.language'] = 'zh'")
    body, wait = {}, {"seconds": 12.3, "rank": 0, "peers": "1", "step": 481}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=body))
    page.route("**/health", lambda route: route.fulfill(json={"status": "ok", "wait": wait}))
    page.reload()
    expect(page.locator("#banner")).to_contain_text("已停滞 12 秒：rank 0 在等待 rank 1（第 481 步）。")
    for code, text in ERRORS.items():
        body["error"] = {"message": "in English", "code": code}
        page.get_by_role("textbox", name="输入消息").fill(code)
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name="助手").last).to_contain_text(text)
    words = json.dumps(page.locator("body").inner_text(), ensure_ascii=False)
    assert "in English" not in words
    page.evaluate("localStorage['labinfer.language'] = 'en'")
    page.reload()
    expect(page.locator("#banner")).to_contain_text("Stalled for 12 s: rank 0 waits for rank 1 in step 481.")
    page.unroute_all()


def test_facts_of_the_model_are_beside_its_name(page):
    expect(page.locator("#facts")).to_have_text(
        re.compile(r"^2\.95M parameters · (bfloat16|float32) · context length 2,048 · 2 stages$")
    )
    stage = {"tensor_parallel_size": 2, "dtype": "bfloat16", "quantization": "int4"}
    model = {"num_parameters": 70_553_706_496, "max_model_len": 131072}
    found = page.evaluate(
        """async (models) => {
            const { modelFacts } = await import("/webui/model_facts.js");
            const { english } = await import("/webui/words_en.js");
            return models.map((model) => modelFacts(model, english));
        }""",
        [
            model | {"stages": [stage]},
            model | {"stages": [stage, stage | {"tensor_parallel_size": 1, "quantization": "none"}]},
            {"id": "demo"},
        ],
    )
    assert found == [
        "70.6B parameters · bfloat16 int4 · context length 131,072 · TP 2",
        "70.6B parameters · bfloat16 int4, bfloat16 · context length 131,072 · 2 stages · TP 2, 1",
        "",
    ]
