"""What an answer may bring into the page: text, tables, code, formulas, and nothing that runs or asks other machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chat_page import ask, dictate
from chromium import watched
from playwright.sync_api import Page, expect

RICH = """## A title

Some **bold** text, `code`, and $e^{i\\pi} = -1$; it costs $5 or $6.

| rank | layers |
|---|---|
| 0 | 0-13 |

```python
def half(x):
    return x / 2
```

$$
\\frac{p-1}{m+p-1}
$$
"""
HOSTILE = """Look: <script>window.owned = 1</script>

<script>
window.owned = 2
</script>

<img src=x onerror="window.owned = 3"> <b onclick="window.owned = 4">bold</b>

[a link](javascript:window.owned=5) ![a picture](https://example.com/x.png)

<iframe src="https://example.com"></iframe> <style>body { display: none }</style> <div style="position:fixed">x</div>
"""
RENDER = """async (text) => {
    const { renderMarkdown } = await import("/webui/markdown.js");
    const { renderMath } = await import("/webui/math.js");
    const place = document.createElement("div");
    document.getElementById("rendered")?.remove(); // of an earlier test
    place.id = "rendered";
    place.append(renderMarkdown(text, () => {}));
    document.body.append(place);
    await Promise.all([...place.querySelectorAll("[data-math]")].map(renderMath)); // once more, to know when it is drawn
}"""
GROW = """async ([text, finishes]) => {
    const { GrowingMarkdown, renderMarkdown } = await import("/webui/markdown.js");
    const { renderMath } = await import("/webui/math.js");
    const { frameCode } = await import("/webui/code_view.js");
    const frame = (pre) => frameCode(pre, { code: "Code", copy: "Copy" });
    const place = document.createElement("div"), whole = document.createElement("div");
    const growing = new GrowingMarkdown(place, frame);
    for (let end = 1; end <= text.length; end++) growing.show(text.slice(0, end));
    if (finishes) growing.finish(text);
    whole.append(renderMarkdown(text, frame));
    for (const one of [place, whole]) await Promise.all([...one.querySelectorAll("[data-math]")].map(renderMath));
    const plain = (one) => one.innerHTML.replace(/\\s+/g, " ");
    return [plain(place), plain(whole)];
}"""


@pytest.fixture(scope="module")
def renderer(browser, server) -> Iterator[Page]:
    """A page that renders text for one test after the other, and may complain of none."""
    context = browser.new_context(locale="en-US", viewport={"width": 1280, "height": 800})
    with watched(context, server) as page:
        page.goto(server.url)
        yield page
    context.close()


def test_markdown_code_and_formulas(page):
    dictate(page, RICH)
    answer = ask(page, "Go.")
    expect(answer.get_by_role("heading", name="A title")).to_be_visible()
    expect(answer.get_by_role("cell", name="0-13")).to_be_visible()
    expect(answer.locator(".hljs-keyword").first).to_have_text("def")
    expect(answer.locator(".katex")).to_have_count(2)
    expect(answer).to_contain_text("it costs $5 or $6")
    answer.get_by_role("button", name="Copy").first.click()
    assert page.evaluate("navigator.clipboard.readText()") == "def half(x):\n    return x / 2"


def test_code_can_be_copied_where_the_browser_has_no_clipboard_for_the_page(page):
    """As on a page that came over plain HTTP from another machine."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    dictate(page, "```\nx = 1\n```")
    ask(page, "Go.").get_by_role("button", name="Copy").first.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()


def test_scripts_of_an_answer_are_text(page):
    dictate(page, HOSTILE)
    answer = ask(page, "Go.")
    expect(answer).to_contain_text("<script>window.owned = 1</script>")  # told, not run
    expect(answer).to_contain_text("bold")
    page.reload()
    expect(answer).to_contain_text("Look:")
    assert page.evaluate("window.owned") is None
    assert answer.locator("script, iframe, style, img, [onclick], [onerror], .markdown [style]").count() == 0
    hrefs = answer.locator("a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
    assert hrefs in ([None, "https://example.com/x.png"], ["https://example.com/x.png"])


@pytest.mark.parametrize(
    "text",
    [
        "<a href='javascript:alert(1)'>x</a>",
        "<svg><script>alert(1)</script></svg>",
        "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
        "`</code><script>alert(1)</script>`",
        '```"><script>alert(1)</script>\nx\n```',
        "$\\href{javascript:alert(1)}{x}$",
        "$</span><script>alert(1)</script>$",
        "![x](data:text/html,<script>alert(1)</script>)",
        '![" onerror="alert(1)](data:image/png;base64,AAAA)',
        "<p class='unseen' id='input' style='color:red'>x</p>",
        "<b title='>' onerror=alert(1)>x</b>",
        "<scr<script>ipt>alert(1)</script>",
        "[x](data:text/html,x) [y](vbscript:x) <a href='//192.0.2.1'>z</a>",
    ],
)
def test_no_way_around_the_sanitiser(renderer, text):
    renderer.evaluate(RENDER, text)
    place = renderer.locator("#rendered")
    assert place.locator("script, style, form, svg script, [onerror], [id], .unseen").count() == 0
    for address in place.locator("[href], [src]").evaluate_all(
        "all => all.map((one) => one.getAttribute('href') ?? one.src)"
    ):
        assert address.startswith("data:image/png")


@pytest.mark.parametrize("finishes", [False, True])
@pytest.mark.parametrize("text", [RICH, HOSTILE, "- a\n- b\n\n  more\n\n1. x\n   ```js\n   let a = 1;\n   ```\n\nend"])
def test_answer_that_grew_looks_like_one_that_was_there(renderer, text, finishes):
    grown, whole = renderer.evaluate(GROW, [text, finishes])
    assert grown.replace(" ", "") == whole.replace(" ", "")


def test_what_was_unfolded_in_an_answer_stays_so_at_its_end(renderer):
    unfolded = renderer.evaluate(
        """async (text) => {
            const { GrowingMarkdown } = await import("/webui/markdown.js");
            const place = document.createElement("div");
            const growing = new GrowingMarkdown(place, () => {});
            growing.show(text);
            place.querySelectorAll("details")[1].open = true;
            growing.finish(text);
            return [...place.querySelectorAll("details")].map((one) => one.open);
        }""",
        "<details><summary>s</summary>a</details>\n\n" * 3 + "end",
    )
    assert unfolded == [False, True, False]


def test_policy_blocks_what_the_sanitiser_would_let_through(context, server):
    """The second wall: scripts and requests that did get into the page."""
    page = context.new_page()
    page.goto(server.url)
    violations = page.evaluate(
        """async () => {
            const found = new Set();
            addEventListener("securitypolicyviolation", (event) => found.add(event.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.owned = 1";
            document.body.append(script);
            const other = new Image();
            other.src = "http://192.0.2.1/x.png";
            await fetch("http://192.0.2.1/").catch(() => {});
            for (let tries = 0; found.size < 3 && tries < 100; tries++) await new Promise((resolve) => setTimeout(resolve, 100));
            return [...found];
        }"""
    )
    assert {"script-src-elem", "img-src", "connect-src"} <= set(violations)
    assert page.evaluate("window.owned") is None


@pytest.mark.parametrize(
    ("text", "strong"),
    [
        ("**注意：**这里有坑", ["注意："]),
        ("这是**“引用”**的话，和**重点**。", ["“引用”", "重点"]),
        ("**a** b **c:** d", ["a", "c:"]),
        ("2 ** 3 ** 4 and `**x:**y`", []),
    ],
)
def test_strong_text_needs_no_spaces_around_it(renderer, text, strong):
    renderer.evaluate(RENDER, text)
    expect(renderer.locator("#rendered strong")).to_have_text(strong)


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        ("$a$ and \\(b\\) and $$c$$ and \\[d\\]", ["a", "b", "c", "d"]),
        ("\\[\nx\n\\]\n", ["x"]),
        ("it costs $5 or $6, not $ 7 $, and \\$8$", []),
        ("`$x$` and\n\n```\n$$y$$\n```", []),
        ("$$\nnever closed", []),
    ],
)
def test_what_is_a_formula(renderer, text, formulas):
    renderer.evaluate(RENDER, text)
    found = renderer.locator("#rendered [data-tex]").evaluate_all("all => all.map((one) => one.dataset.tex)")
    assert found == formulas


def test_columns_of_a_table_are_aligned_as_they_are_said_to_be(renderer):
    renderer.evaluate(RENDER, "| a | b |\n|---|--:|\n| 1 | 2 |")
    sides = renderer.locator("#rendered td").evaluate_all(
        "cells => cells.map((cell) => getComputedStyle(cell).textAlign)"
    )
    assert [side.removeprefix("-webkit-") for side in sides] == ["left", "right"]


def test_words_of_a_table_are_whole(renderer):
    cells = " | ".join(["number", "of layers", "a rather long heading", "xxxxxxxxxxxxxxxxxxxx"] * 4)
    renderer.evaluate(RENDER, f"| {cells} |\n{'|---' * 16}|\n| {cells} |")
    renderer.locator("#rendered").evaluate("(place) => { place.className = 'markdown'; place.style.width = '300px'; }")
    heights = renderer.locator("#rendered td").evaluate_all(
        "cells => cells.slice(0, 4).map((cell) => { const range = document.createRange();"
        "range.selectNodeContents(cell); return new Set([...range.getClientRects()].map((one) => one.top)).size; })"
    )
    assert heights[0] == heights[3] == 1 and heights[1] <= 2 and heights[2] <= 4


def test_tags_that_become_text_are_a_paragraph(renderer):
    renderer.evaluate(
        RENDER, "a\n\n---\n\n<script>\nx()\n</script>\n\n<details><summary>s</summary>\n\nb\n\n</details>"
    )
    tags = renderer.locator("#rendered > *").evaluate_all("all => all.map((one) => one.tagName)")
    assert tags == ["P", "HR", "P", "DETAILS"]
    expect(renderer.locator("#rendered > p").last).to_have_text("<script> x() </script>")
