"""Screenshots of both pages for docs/images: the chat page with the demo model, the cluster page under load.

    python tests/browser/screenshots.py DIR

The cluster page shows the model in DIR on three pipeline stages; steps should take some milliseconds (``make screenshots`` makes such a model).

Both themes, both languages, 1280 and 390 pixels.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(Path(__file__).parent)]

from chat_page import ask, dictate  # noqa: E402
from chromium import CHROMIUM, FLAGS  # noqa: E402
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402
from serving import Server, serving  # noqa: E402

IMAGES = ROOT / "docs" / "images"
LOCALES = {"en": "en-US", "zh": "zh-CN"}
THEMES = ("light", "dark")
SIZES = {1280: 860, 390: 844}
"""Width to height of the window."""
CLUSTER_HEIGHT = 955
"""Height of the window for the wide cluster page, which shows the first row of charts, too."""
WARM_UP_SECONDS = 90
"""Load before the first screenshot of the cluster page, so that the charts have a history."""
WATCHED_MS = 6000
"""Time on the cluster page before a screenshot, in milliseconds."""
USERS = ("ann", "bo", "chen", "dee", "eli", "fay", "gil", "han", "ida", "jo", "kim", "lu")
QUESTIONS = {
    "en": ["17 + 25 = ?", "What is the capital of France?", "How much time is lost in a pipeline?"],
    "zh": ["17 + 25 = ?", "法国的首都是哪里？", "流水线会损失多少时间？"],
}
ANSWERS = {
    "en": [
        "42",
        "Paris",
        """A model is cut into **stages**, and each rank runs one of them:

1. Rank 0 composes a *micro-batch* and runs the first layers.
2. Hidden states go from stage to stage.
3. The last stage samples, and the tokens go back to rank 0.

With $m$ micro-batches on $p$ stages, the share of time that a stage stands idle is

$$\\frac{p-1}{m+p-1}$$

```python
def idle_share(stages: int, micro_batches: int) -> float:
    return (stages - 1) / (micro_batches + stages - 1)
```

| stages | micro-batches | idle |
|---|---|---|
| 2 | 2 | 33 % |
| 2 | 8 | 11 % |
""",
    ],
    "zh": [
        "42",
        "巴黎",
        """模型被切成若干**阶段**，每个 rank 运行其中一段：

1. rank 0 组成一个*微批次*，计算最前面几层。
2. 隐藏状态在各阶段之间依次传递。
3. 最后一个阶段采样，token 回到 rank 0。

$p$ 个阶段、$m$ 个微批次时，一个阶段空闲的时间占比为

$$\\frac{p-1}{m+p-1}$$

```python
def idle_share(stages: int, micro_batches: int) -> float:
    return (stages - 1) / (micro_batches + stages - 1)
```

| 阶段 | 微批次 | 空闲 |
|---|---|---|
| 2 | 2 | 33 % |
| 2 | 8 | 11 % |
""",
    ],
}


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        with serving("--model", "demo", launcher="mpirun", ranks=2) as server:
            draw_chats(server, browser)
        with (
            serving("--model", f"small={sys.argv[1]}", "-pp", "3", launcher="mpirun", ranks=3) as server,
            users(server),
        ):
            time.sleep(WARM_UP_SECONDS)
            draw_clusters(server, browser)
        browser.close()


def draw_chats(server: Server, browser: Browser) -> None:
    conversations = {language: record(server, browser, language) for language in LOCALES}
    for language, theme, width in itertools.product(LOCALES, THEMES, SIZES):
        with opened(browser, language, theme, width) as page:
            page.goto(server.url)
            page.locator("#import-file").set_input_files(conversations[language])
            page.get_by_role("article").last.wait_for()
            page.evaluate("document.activeElement.blur()")
            page.wait_for_timeout(500)
            page.screenshot(path=IMAGES / f"chat-{language}-{theme}-{width}.png")


def draw_clusters(server: Server, browser: Browser) -> None:
    for language, theme, width in itertools.product(LOCALES, THEMES, SIZES):
        with opened(browser, language, theme, width) as page:
            if width > min(SIZES):
                page.set_viewport_size({"width": width, "height": CLUSTER_HEIGHT})
            page.goto(f"{server.url}/cluster")
            page.wait_for_timeout(WATCHED_MS)
            page.screenshot(path=IMAGES / f"cluster-{language}-{theme}-{width}.png")


@contextmanager
def opened(browser: Browser, language: str, theme: str, width: int) -> Iterator[Page]:
    is_phone = width < 600
    context = browser.new_context(
        locale=LOCALES[language],
        color_scheme=theme,
        viewport={"width": width, "height": SIZES[width]},
        is_mobile=is_phone,
        has_touch=is_phone,
    )
    yield context.new_page()
    context.close()


def record(server: Server, browser: Browser, language: str) -> Path:
    """Export file of conversations with the answers of ``ANSWERS``, to which the model is constrained."""
    with opened(browser, "en", "light", 1280) as page:
        page.goto(server.url)
        for question, answer in zip(QUESTIONS[language], ANSWERS[language], strict=True):
            page.locator("#new").click()
            dictate(page, answer)
            ask(page, question)
        with page.expect_download() as download:
            page.locator("#export-all").click()
        file = Path(tempfile.mkdtemp()) / f"{language}.json"
        download.value.save_as(file)
    return file


@contextmanager
def users(server: Server) -> Iterator[None]:
    """Load: one request after another of each of ``USERS``, with different prompt and answer lengths."""
    over = threading.Event()

    def ask_on(user: int) -> None:
        num_tokens = 40 + 15 * user
        for number in itertools.count():
            if over.is_set():
                return
            prompt = [10 + (7 * user + 3 * number * (number % 4) + n) % 300 for n in range(100 + 40 * user)]
            body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "user": USERS[user]}
            server.ask("POST", "/v1/completions", body)

    with ThreadPoolExecutor(len(USERS)) as pool:
        for user in range(len(USERS)):
            pool.submit(ask_on, user)
        yield
        over.set()


if __name__ == "__main__":
    main()
