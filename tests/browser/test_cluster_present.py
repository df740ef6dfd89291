"""What the cluster page says of the present: the bottleneck, open requests, links, memory, and the step under the pointer."""

from __future__ import annotations

import json
import re

import pytest
from axe_findings import findings
from cluster_page import MS, cluster, come_back_to, picture, push, see, stats, step, steps, wait_streams
from playwright.sync_api import expect

REPORT = {
    "time_us": 1_700_000_000_000_000,
    "seconds": 9.5,
    "bound": "stage",
    "stages": [
        {"stage": 0, "busy": 0.6, "step_seconds": 0.006},
        {"stage": 1, "busy": 0.96, "step_seconds": 0.0096},
    ],
    "busiest": 1,
    "lead": 1.6,
    "move_to": 0,
    "stage_latency_seconds": 0.0005,
    "running": 1.2,
    "full": None,
}
ONE_STAGE = {"stages": [{"stage": 0, "busy": 0.5, "step_seconds": 0.002}], "busiest": 0, "lead": 1.0, "move_to": None}
LINKS = [
    {"a": "node-a", "b": "node-b", "latency": 0.0003, "bytes_per_second": 125e6},
    {"a": "node-c", "b": "node-a", "latency": 0.03, "bytes_per_second": 1.25e6},
]
SAYINGS = [
    (
        {},
        "Bottleneck: stage 1. It computes 96 % of the time, 1.6 × stage 0.",
        "Try moving layers from stage 1 to stage 0 (--layers).",
        "瓶颈：阶段 1。它有 96 % 的时间在计算，是阶段 0 的 1.6 倍。",
    ),
    (
        {"bound": "stages", "full": "max_num_seqs"},
        "Bottleneck: compute. The stages are balanced, each busy 60 % to 96 % of the time.",
        "Try more ranks (-tp, -pp) or fewer bits per weight (--dtype, --quantization). "
        "Sequences wait because the batch is full. Try a larger --max-num-seqs.",
        "瓶颈：计算。各阶段均衡，每个阶段有 60 % 到 96 % 的时间在忙碌。",
    ),
    (
        {"bound": "requests"},
        "Bottleneck: too few concurrent requests. 1.2 sequences run on average, fewer than the 2 stages. "
        "Each stage is busy 60 % to 96 % of the time.",
        "Try more concurrent requests.",
        "瓶颈：并发请求太少。平均运行 1.2 个序列，少于 2 个阶段。每个阶段有 60 % 到 96 % 的时间在忙碌。",
    ),
    (
        {"bound": "communication"},
        "Bottleneck: communication. Stage 1, the busiest, computes 9.6 ms and waits 0.4 ms per step "
        "(stage-to-stage latency at startup: 0.5 ms).",
        "Try fewer stages, a faster network, or more concurrent requests.",
        "瓶颈：通信。最忙的阶段 1 每步计算 9.6 ms，等待 0.4 ms（启动时测得的阶段间延迟：0.5 ms）。",
    ),
    (
        ONE_STAGE | {"bound": "models"},
        "Bottleneck: other models on the same ranks. The only stage computes for this model 50 % of the time.",
        "",
        "瓶颈：同一批 rank 上的其他模型。唯一的阶段有 50 % 的时间为本模型计算。",
    ),
    (
        ONE_STAGE | {"bound": "outside", "full": "kv_cache"},
        "Bottleneck: overhead outside the model, such as scheduling. The only stage computes 50 % of the time.",
        "Sequences wait because the KV cache is full. Try a larger --memory-utilization, or --kv-cache-dtype int8.",
        "瓶颈：模型之外的开销，例如调度。唯一的阶段有 50 % 的时间在计算。",
    ),
]


def request(number: int, **fields) -> dict:
    return {
        "id": f"request-{number}",
        "object": "request",
        "model": "demo",
        "own": True,
        "caller": "anonymous",
        "user": None,
        "state": "running",
        "age": 12.34,
        "prompt_tokens": 1000,
        "cached_tokens": 0,
        "generated_tokens": 250,
        "max_tokens": 500,
    } | fields


def test_bottleneck_is_a_sentence_in_both_languages(opened):
    said = opened.evaluate(
        """async (reports) => {
            const { adviceText, bottleneckText } = await import("/webui/cluster/bottleneck_view.js");
            const { english } = await import("/webui/words_en.js");
            const { chinese } = await import("/webui/words_zh.js");
            return reports.map((report) => [bottleneckText(report, english), adviceText(report, english), bottleneckText(report, chinese)]);
        }""",
        [REPORT | fields for fields, *_ in SAYINGS],
    )
    assert [tuple(row) for row in said] == [tuple(texts) for _, *texts in SAYINGS]


def test_present_is_told_as_it_comes(opened):
    """The bottleneck, links, memory against what there is, and how busy each rank was."""
    expect(opened.locator("#bottleneck-says")).to_have_text("No data yet; send some requests.")
    expect(opened.locator("#links")).to_be_hidden()
    links = [
        {"source": 0, "destination": 1, "bytes_sent": 5 << 20, "bytes_per_second": 2048.0, "bytes_per_step": 512.0},
        {"source": 1, "destination": 0, "bytes_sent": 300, "bytes_per_second": None, "bytes_per_step": None},
    ]
    push(opened, stats(0), stats(1, bottleneck=REPORT, links=links))
    expect(opened.locator("#bottleneck")).to_contain_text("Bottleneck: stage 1. It computes 96 % of the time")
    expect(opened.locator("#bottleneck-of")).to_contain_text("over 9.5 s with work")
    rows = opened.locator("#links tbody tr")
    expect(rows.nth(0)).to_have_text("Rank 0 → rank 1node-0 → node-12 KiB/s512 B5 MiB")
    expect(rows.nth(1)).to_have_text("Rank 1 → rank 0node-1 → node-0––300 B")
    expect(opened.locator("#links-say")).to_contain_text("Stage-to-stage latency at startup: 100 µs")
    rank = opened.locator("#ranks tbody tr").first
    expect(rank).to_contain_text("200 MiBhost: 6 GiB of 16 GiB")
    history = rank.get_by_role("img", name="Rank 0, busy: 50 % now; maximum 50 % in the last 5 minutes")
    expect(history.locator(".curve")).to_have_attribute("d", re.compile("M.*L.*|M1"))
    history.hover(position={"x": 111, "y": 10})  # further from now, nothing is known
    expect(rank.locator(".busy .more")).to_have_text("22:13:21")


def stage(number: int, seconds: float, predicted: float | None = None, slowdown: float | None = None) -> dict:
    return {
        "stage": number,
        "rank": number,
        "step_seconds": seconds,
        "predicted_seconds": predicted,
        "slowdown": slowdown,
    }


def test_stages_are_compared_with_what_was_predicted_or_with_each_other(opened):
    cases = [
        [stage(0, 0.01)],
        [stage(0, 0.01, 0.008)],
        [stage(0, 0.002), stage(1, 0.004), stage(2, 0.012)],
        [stage(0, 0.004, 0.002, 2.0), stage(1, 0.004, 0.004, 1.0)],
        [stage(0, 0.0), stage(1, 0.0)],
    ]
    compared = opened.evaluate(
        """async (cases) => {
            const { compare } = await import("/webui/cluster/speeds_view.js");
            return cases.map((stages) => compare(stages).map(({ expected, ratio, isSlow }) => [expected, ratio, isSlow]));
        }""",
        cases,
    )
    assert compared == [
        [[None, None, False]],
        [[0.008, pytest.approx(1.25), False]],
        [
            [pytest.approx(0.008), pytest.approx(0.25), False],
            [pytest.approx(0.007), pytest.approx(4 / 7), False],
            [pytest.approx(0.003), pytest.approx(4), False],
        ],
        [[0.002, 2.0, True], [0.004, 1.0, False]],
        [[0, None, False], [0, None, False]],
    ]


def test_slow_stage_is_seen_at_a_glance(opened):
    expect(opened.locator("#speeds")).to_be_hidden()
    push(opened, stats(0, stages=[stage(0, 0.002), stage(1, 0.002)]))
    rows = opened.locator("#speeds tbody tr")
    expect(rows.nth(0)).to_have_text("Stage 0node-0 · layers 0–32 ms2 msmean of the other stages1 ×")
    expect(opened.locator("#speeds [data-slow]")).to_have_count(0)
    drift = {"slow_stage": 1, "better_layers": [5, 3], "gain": 0.31}
    push(opened, stats(1, stages=[stage(0, 0.002, 0.0018, 1.111), stage(1, 0.004, 0.002, 2.0)], drift=drift))
    expect(rows.nth(0)).to_have_text("Stage 0node-0 · layers 0–32 ms1.8 msmeasured at startup1.11 ×")
    expect(rows.nth(1)).to_have_text("Stage 1node-1 · layers 4–74 ms2 msmeasured at startup2 ×slow")
    expect(opened.locator("#speeds-try")).to_have_text("Try --layers 5,3: 31 % more throughput.")
    bars = [bar.bounding_box()["width"] for bar in opened.locator("#speeds .bar").all()]
    assert bars[1] == pytest.approx(2 * bars[0], rel=0.05)
    colours = opened.locator("#speeds .bar").evaluate_all(
        "(bars) => bars.map((bar) => getComputedStyle(bar).backgroundColor)"
    )
    assert colours[0] != colours[1]
    push(opened, stats(2, stages=[]))
    expect(opened.locator("#speeds")).to_be_hidden()


def test_links_of_machines_and_the_plan_are_shown_where_they_are_known(opened):
    for place in ("#machines", "#plan"):
        expect(opened.locator(place)).to_be_hidden()
    come_back_to(opened, cluster(machine_links=LINKS, plan="host    layers\nnode-a  0-13"))
    rows = opened.locator("#machines tbody tr")
    expect(opened.locator("#machines thead th")).to_have_text(["From / to", "node-a", "node-b", "node-c"])
    expect(rows.nth(0)).to_have_text("node-a–300 µs119 MiB/s30 ms1.19 MiB/s")
    expect(rows.nth(1)).to_have_text("node-b300 µs119 MiB/s––")
    levels = rows.nth(0).locator("td").evaluate_all("(cells) => cells.map((cell) => cell.dataset.level ?? null)")
    assert levels == [None, "0", "3"]
    expect(opened.locator("#plan-text")).to_have_text("host    layers\nnode-a  0-13", use_inner_text=True)


def test_requests_are_told_and_ones_own_cancelled(opened):
    expect(opened.locator("#requests p.hint")).to_have_text("No open requests.")
    waiting = {"generated_tokens": 0, "prompt_tokens": 2000, "state": "waiting"}
    others = request(3, own=False, caller="bob", **waiting)
    opened.evaluate(
        "(requests) => { fake.requests = requests; }",
        [request(1, caller="ann", user="u-7"), request(2, max_tokens=0), others],
    )
    chunk = step(1, prefill=512) | {
        "sequences": [{"request": "request-3", "tokens": 512, "context": 512, "decode": False}]
    }
    push(opened, stats(0), steps(0, MS, [chunk], [("run", 0, MS, 1)]))
    rows = opened.locator("#requests tbody tr")
    expect(rows).to_have_count(3)
    expect(opened.locator("#open-counts")).to_have_text("2 running, 1 waiting")
    expect(rows.nth(0)).to_contain_text("request-1ann / u-7Running12.3 s1,000250 of max. 500Cancel")
    expect(rows.nth(1)).to_contain_text("request-2–Running12.3 s")
    expect(rows.nth(2)).to_contain_text("request-3bobWaiting12.3 s1,024 of 2,0000 of max. 500–")
    expect(rows.nth(2).get_by_role("button")).to_have_count(0)
    cancel = opened.get_by_role("button", name="Cancel request request-2")
    cancel.focus()
    opened.evaluate(
        "() => { fake.requests[1].age = 99; fake.requests.push({ ...fake.requests[0], id: 'request-4' }); }"
    )
    expect(rows.nth(1)).to_contain_text("99 s")
    expect(rows).to_have_count(4)
    expect(cancel).to_be_focused()
    opened.evaluate("() => { fake.refusal = 'out of order'; }")
    cancel.press("Enter")
    refusal = opened.get_by_role("alert").filter(has_text="Request request-2 could not be cancelled: out of order")
    expect(refusal).to_be_visible()
    expect(cancel).to_be_focused()
    opened.evaluate("() => { fake.refusal = null; }")
    cancel.press("Enter")
    expect(rows).to_have_count(3)
    expect(refusal).to_have_count(0)
    assert opened.evaluate("fake.cancelled") == ["request-2"]


def test_ranks_that_stand_still_are_named(opened):
    wait = {"seconds": 12.3, "rank": 0, "peers": "1", "step": 481}
    opened.route("**/health", lambda route: route.fulfill(json={"status": "ok", "wait": wait}))
    opened.reload()
    expect(opened.locator("#banner")).to_contain_text("Stalled for 12 s: rank 0 waits for rank 1 in step 481.")
    wait_streams(opened, 1)
    push(opened, stats(0))
    expect(opened.locator("#state")).to_have_text("Stalled")
    opened.unroute_all()


def test_step_under_the_pointer_is_told(opened):
    see(opened, steps(0, 20 * MS, [step(7)], [("run", 0, 10 * MS, 7)]))
    hover = opened.locator("#hover")
    expect(opened.locator("#summary")).to_contain_text("1 step")
    picture(opened).hover(position={"x": 100, "y": 36})
    expect(hover).to_have_text("Step 7: 1 sequence, 1 decode token, 10 ms end to end, 10 ms of compute on all ranks.")
    opened.mouse.move(5, 5)
    expect(hover).to_be_hidden()


@pytest.mark.parametrize("language, theme, title", [("en", "light", "Diagnosis"), ("zh", "dark", "诊断")])
def test_telephone_has_room_for_all_of_several_models(opened, language, theme, title):
    names = ["meta-llama/Llama-3.3-70B-Instruct-with-a-long-name", "Qwen/Qwen3-235B-A22B-Instruct-2507"]
    link = {"source": 0, "destination": 1, "bytes_sent": 5 << 20, "bytes_per_second": 2048.0, "bytes_per_step": 512.0}
    experts = [{"layer": number, "tokens": [6, 0, 3, 3] * 32} for number in range(8)]
    told = {
        "models": names,
        "requests": [request(1, id="x" * 64)],
        "refusal": "out of order " * 5,
        "cluster": cluster(
            model=names[0],
            bottleneck=REPORT,
            links=[link],
            experts=experts,
            expert_reads=[],
            stages=[stage(0, 0.002, 0.0018, 1.1), stage(1, 0.004, 0.002, 2.0)],
            machine_links=LINKS,
            plan="node-a  0-13 " * 20,
        ),
    }
    opened.emulate_media(color_scheme=theme, reduced_motion="reduce")
    opened.add_init_script(
        f"localStorage.setItem('labinfer.language', '{language}'); Object.assign(fake, {json.dumps(told)});"
    )
    opened.set_viewport_size({"width": 390, "height": 844})
    opened.reload()
    expect(opened.get_by_role("region", name=title)).to_contain_text("1.6")
    expect(opened.locator("#model")).to_be_visible()
    opened.locator("#requests tbody button").click()
    expect(opened.locator("#requests").get_by_role("alert")).to_contain_text("out of order")
    expect(opened.locator("#experts")).to_be_visible()
    expect(opened.locator("#links")).to_be_visible()
    for place in ("#speeds", "#machines", "#plan"):
        expect(opened.locator(place)).to_be_visible()
    assert opened.evaluate("document.documentElement.scrollWidth") == 390
    assert findings(opened) == []
