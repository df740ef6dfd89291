"""The picture of the pipeline, of news that are made up: what is drawn, counted, selected and forgotten."""

from __future__ import annotations

import re

from cluster_page import (
    MS,
    cluster,
    colour_at,
    come_back_to,
    details,
    hide,
    picture,
    push,
    rank,
    see,
    stats,
    step,
    steps,
    theme_colour,
    wait_streams,
)
from playwright.sync_api import expect

ROWS = (48, 134)
"""Where the middles of the rows of ranks 0 and 1 are, in pixels."""
TWO_STEPS = steps(
    0,
    20 * MS,
    [step(1, decode=3), step(2, prefill=64, decode=0)],
    [
        ("engine", 0, 20 * MS, -1),
        ("prepare", 0, 1 * MS, 1),
        ("run", 1 * MS, 5 * MS, 1),
        ("send", 5 * MS, 5 * MS + 100, 1),
        ("wait for tokens", 5 * MS + 100, 10 * MS, 1),
        ("run", 10 * MS, 15 * MS, 2),
    ],
    [
        ("step", 0, 10 * MS, 1),
        ("wait for activations", 0, 5 * MS, 1),
        ("run", 5 * MS, 9 * MS, 1),
        ("sample", 9 * MS, 10 * MS, 1),
        ("wait for activations", 10 * MS, 15 * MS, 2),
        ("run", 15 * MS, 20 * MS, 2),
    ],
)
"""Two micro-batches, one after the other through both stages: half of the time each rank waits."""


def test_steps_stand_where_they_ran_and_bubbles_are_counted(opened):
    expect(opened.locator("#state")).to_have_text("Idle")
    expect(opened.get_by_text("Stages and their micro-batches appear")).to_be_visible()
    see(opened, TWO_STEPS)
    expect(opened.locator("#state")).to_have_text("Live")
    expect(opened.get_by_text("Stages and their micro-batches appear")).to_be_hidden()
    expect(opened.locator("#overall")).to_have_text("50 %")
    expect(opened.locator("#rows .share")).to_have_text(["50 % bubble", "50 % bubble"])
    expect(opened.locator("#summary")).to_contain_text(", 2 steps")
    width = picture(opened).bounding_box()["width"]
    at = lambda ms, row: colour_at(opened, ms / 20 * width, ROWS[row] + 12)  # beside the number  # noqa: E731
    decode, bubble = theme_colour(opened, "decode"), theme_colour(opened, "bubble")
    assert [at(3, 0), at(7.5, 0), at(17.5, 0)] == [decode, bubble, bubble]
    assert [at(2.5, 1), at(7, 1), at(12.5, 1)] == [bubble, decode, bubble]
    prefill = {tuple(colour_at(opened, 12.5 / 20 * width + dx, ROWS[0] + 12)) for dx in range(8)}
    assert tuple(theme_colour(opened, "prefill")) in prefill and len(prefill) > 1  # it is striped


def test_time_without_work_is_nobody_s_bubble(opened):
    idle = steps(20 * MS, 80 * MS, [], [], [("wait for a plan", 20 * MS, 80 * MS, -1)])
    see(opened, TWO_STEPS, idle, span="50 ms")
    expect(opened.locator("#summary")).to_contain_text(", 0 steps")
    expect(opened.locator("#overall")).to_be_hidden()
    opened.get_by_label("Time span").select_option(label="200 ms")
    expect(opened.locator("#overall")).to_have_text("50 %")


def test_time_of_which_nothing_is_known_is_left_out_and_said(opened):
    later = steps(
        40 * MS, 50 * MS, [step(9)], [("run", 40 * MS, 50 * MS, 9)], [("wait for activations", 40 * MS, 50 * MS, 9)]
    )
    see(opened, TWO_STEPS, later, span="50 ms")
    expect(opened.locator("#rows .share")).to_have_text(["33 % bubble", "67 % bubble"])  # of 30 ms
    width = picture(opened).bounding_box()["width"]
    seen = {tuple(colour_at(opened, 30 / 50 * width + dx, ROWS[0])) for dx in range(9)}
    assert len(seen) > 1 and tuple(theme_colour(opened, "bubble")) not in seen  # hatched


def test_step_is_selected_by_a_click_and_explained(opened):
    see(opened, TWO_STEPS)
    expect(opened.locator("#overall")).to_have_text("50 %")
    width = picture(opened).bounding_box()["width"]
    picture(opened).click(position={"x": 12.5 / 20 * width, "y": ROWS[0]})
    expect(details(opened).get_by_role("heading")).to_have_text("Step 2")
    expect(details(opened)).to_contain_text("Prefill")
    expect(details(opened)).to_contain_text("1 sequence, 64 prompt tokens, 10 ms end to end, 10 ms of compute")
    expect(opened.locator("#state")).to_have_text("Paused")  # it stands still while it is read
    assert opened.evaluate("fake.streams.length") == 0
    picture(opened).click(position={"x": 7.5 / 20 * width, "y": ROWS[1]})
    expect(details(opened).get_by_role("heading")).to_have_text("Step 1")
    times = details(opened).get_by_role("table", name="Time per rank").get_by_role("row")
    expect(times).to_have_text(
        [
            "RankStageStartPrepare inputsWait for activationsForward passSampleSendWait for tokens",
            "00+01 ms–4 ms–100 µs4.9 ms",
            "11+0–5 ms4 ms1 ms––",
        ]
    )
    sequences = details(opened).get_by_role("table", name="Sequences of this step").get_by_role("row")
    expect(sequences).to_have_count(4)
    expect(sequences.nth(3)).to_have_text("Decode1102chatcmpl-2")
    picture(opened).click(position={"x": 17.5 / 20 * width, "y": ROWS[0]})  # a bubble
    expect(details(opened)).to_be_hidden()
    wait_streams(opened, 1)  # and it goes on


def test_steps_are_gone_through_by_keyboard(opened):
    news = [
        steps(
            at * 20 * MS,
            (at + 1) * 20 * MS,
            [step(at)],
            [("run", at * 20 * MS, at * 20 * MS + 8 * MS, at)],
            [("run", at * 20 * MS + 8 * MS, at * 20 * MS + 16 * MS, at)],
        )
        for at in range(20)
    ]
    see(opened, *news)
    expect(opened.locator("#summary")).to_contain_text("1 step")
    picture(opened).focus()
    heading = details(opened).get_by_role("heading")
    for key, number in [("ArrowLeft", 19), ("ArrowLeft", 18), ("PageUp", 8), ("ArrowRight", 9), ("PageDown", 19)]:
        opened.keyboard.press(key)
        expect(heading).to_have_text(f"Step {number}")
        expect(picture(opened)).to_have_attribute("aria-valuenow", str(number))
        expect(picture(opened)).to_have_attribute(
            "aria-valuetext",
            f"Step {number}: 1 sequence, 1 decode token, 16 ms end to end, 16 ms of compute on all ranks.",
        )
    for _ in range(5):
        opened.keyboard.press("PageUp")
    expect(heading).to_have_text("Step 0")
    width = picture(opened).bounding_box()["width"]
    where = [colour_at(opened, x * width / 20, ROWS[0] + 12) for x in range(20)]
    assert theme_colour(opened, "decode") in where  # the picture has moved there
    details(opened).get_by_role("button", name="Next step").press("Enter")
    opened.keyboard.press("Enter")  # it keeps the focus
    expect(heading).to_have_text("Step 2")
    details(opened).get_by_role("button", name="Close").press("Enter")
    expect(picture(opened)).to_be_focused()
    opened.keyboard.press("ArrowLeft")
    opened.keyboard.press("Escape")
    expect(details(opened)).to_be_hidden()
    expect(opened.locator("#state")).not_to_have_text("Paused")


def test_steps_are_a_table_too(opened):
    see(opened, TWO_STEPS)
    expect(opened.locator("#summary")).to_contain_text(", 2 steps")
    opened.get_by_text("Steps in view as a table").click()
    rows = opened.locator("#steps").get_by_role("row")
    expect(rows).to_have_text(["StepPhaseSequencesTokensTime", "1Decode3310 ms", "2Prefill16410 ms"])
    opened.get_by_role("button", name="2", exact=True).click()
    expect(details(opened).get_by_role("heading")).to_have_text("Step 2")
    expect(opened.get_by_role("button", name="2", exact=True)).to_be_focused()
    expect(opened.get_by_role("button", name="2", exact=True)).to_have_attribute("aria-pressed", "true")


def test_looking_back_by_dragging(opened):
    see(opened, TWO_STEPS, steps(20 * MS, 40 * MS, [], [], [("wait for a plan", 20 * MS, 40 * MS, -1)]))
    expect(opened.locator("#summary")).to_contain_text(", 0 steps")
    box = picture(opened).bounding_box()
    opened.mouse.move(box["x"] + 100, box["y"] + 40)
    opened.mouse.down()
    opened.mouse.move(box["x"] + 100 + box["width"], box["y"] + 40, steps=5)
    opened.mouse.up()
    expect(opened.locator("#summary")).to_contain_text(", 2 steps")
    expect(opened.locator("#state")).to_have_text("Paused")
    expect(details(opened)).to_be_hidden()  # that was no click
    opened.get_by_role("button", name="Resume").click()
    expect(opened.locator("#summary")).to_contain_text(", 0 steps")


def test_charts_have_figures_axes_and_words(opened):
    push(opened, *[stats(second, kv_usage=second / 100) for second in range(0, 60, 2)])
    charts = opened.locator("#charts figure")
    expect(charts).to_have_count(8)
    expect(charts.nth(0)).to_contain_text("TTFT, last minute120 ms p50400 ms p99")
    expect(charts.nth(0).get_by_role("img")).to_have_attribute(
        "aria-label", "TTFT, last minute: p50 120 ms, p99 400 ms now; maximum 400 ms in the last 5 minutes"
    )
    expect(charts.nth(1)).to_contain_text("12.5 ms p5025 ms p99")
    expect(charts.nth(2)).to_contain_text("Queue time, last minute– p50– p99")
    expect(charts.nth(4)).to_contain_text("3 running1 waiting")
    expect(charts.nth(5)).to_contain_text("17.5 88 steps/s")
    expect(charts.nth(6)).to_contain_text("58 % 4,751 of 8,192 blocks, 2 preemptions")
    expect(charts.nth(7)).to_contain_text("75 % hit rate")
    expect(charts.nth(3)).to_contain_text("1234 generated40 prompt")
    expect(charts.nth(3).get_by_role("img")).to_have_attribute(
        "aria-label", "Tokens per second: generated 1234, prompt 40 now; maximum 1234 in the last 5 minutes"
    )
    expect(charts.nth(3).locator("text").nth(2)).to_have_text("2000")
    expect(charts.nth(6).locator("text").nth(2)).to_have_text("60 %")
    assert charts.nth(6).locator(".curve").get_attribute("d").count("M") == 1
    push(opened, stats(120), stats(121))  # a minute without requests is a gap
    expect(charts.nth(6)).to_contain_text("25 %")
    assert charts.nth(6).locator(".curve").get_attribute("d").count("M") == 2
    expect(opened.get_by_role("row").nth(1)).to_contain_text("200 MiBhost: 6 GiB of 16 GiB50 %")


def test_chart_tells_the_figures_of_the_time_that_is_pointed_at(opened):
    push(opened, *[stats(second, running=second) for second in range(0, 300, 3)])
    requests, tokens = opened.locator("#charts figure").nth(4), opened.locator("#charts figure").nth(5)
    expect(requests).to_contain_text("297 running")
    requests.scroll_into_view_if_needed()
    box = requests.get_by_role("img").bounding_box()
    opened.mouse.move(box["x"] + 40 + (box["width"] - 50) / 2, box["y"] + 50)
    expect(requests.get_by_role("heading")).to_have_text(re.compile(r"Requests · \d\d:\d\d:\d\d"))
    told = int(requests.locator("strong").first.text_content())
    assert 140 <= told <= 154
    expect(requests.locator(".pointed")).to_have_count(1)
    opened.mouse.move(box["x"], 10)
    expect(requests).to_contain_text("297 running")
    expect(requests.get_by_role("heading")).to_have_text("Requests")
    expect(tokens.locator(".pointed")).to_have_count(0)


def test_rates_over_a_moment_are_taken_together_with_the_next(opened):
    charts = opened.locator("#charts figure")
    push(opened, stats(0), stats(1, seconds=1), stats(2, seconds=1, steps_per_second=10.0, tokens_per_step=2.0))
    expect(charts.nth(5)).to_contain_text("2 10 steps/s")
    push(
        opened, stats(2.02, seconds=0.02, steps_per_second=50.0, tokens_per_step=128.0)
    )  # the first moment of the next request
    expect(charts.nth(5)).to_contain_text("13.5 10.8 steps/s")  # 148 tokens in 11 steps of 1.02 s
    slow = {"steps_per_second": 1.0, "tokens_per_step": 1.0}
    push(opened, stats(3, seconds=0.98, **slow), stats(4, seconds=1, **slow))
    fast = {"steps_per_second": 250.0, "tokens_per_step": 30.0, "prompt_tokens_per_second": 90_000.0}
    push(opened, stats(4.4, seconds=0.4, **fast))
    less = {"steps_per_second": 100.0, "tokens_per_step": 3.0, "prompt_tokens_per_second": 0.0}
    push(opened, stats(4.6, seconds=0.2, running=7, **less))
    expect(charts.nth(4)).to_contain_text("7 running")
    expect(charts.nth(5)).to_contain_text("25.5 200 steps/s")  # 3060 tokens in 120 steps of 0.6 s
    expect(charts.nth(3)).to_contain_text("60k prompt")
    push(
        opened, stats(64.6, seconds=0.4, steps_per_second=2.5, tokens_per_step=128.0)
    )  # one step after a minute without any
    push(opened, stats(65.1, steps_per_second=198.0, tokens_per_step=1.0))
    expect(charts.nth(5)).to_contain_text("2.27 111 steps/s")  # 128 and 99 tokens in 100 steps of 0.9 s


def test_no_request_is_running_and_the_picture_stays(opened):
    see(opened, TWO_STEPS, stats(0.02))
    expect(opened.locator("#state")).to_have_text("Live")
    push(opened, stats(0.6, running=0, waiting=0), stats(0.7))
    opened.wait_for_timeout(1800)  # longer than the page waits: a moment between two requests is not worth a word
    expect(opened.locator("#state")).to_have_text("Live")
    push(opened, stats(0.8, running=0, waiting=0))
    expect(opened.locator("#state")).to_have_text("Idle")
    expect(opened.locator("#overall")).to_have_text("50 %")


def test_news_are_wanted_only_while_somebody_looks(opened):
    hide(opened, True)
    wait_streams(opened, 0)
    hide(opened, False)
    wait_streams(opened, 1)
    opened.get_by_role("button", name="Pause").click()
    expect(opened.locator("#state")).to_have_text("Paused")
    wait_streams(opened, 0)
    hide(opened, True)
    hide(opened, False)
    assert opened.evaluate("fake.streams.length") == 0
    opened.get_by_role("button", name="Resume").click()
    wait_streams(opened, 1)
    assert opened.evaluate("fake.opened") == 3


def test_nothing_is_drawn_while_nothing_changes(opened):
    see(opened, TWO_STEPS)
    expect(opened.locator("#overall")).to_have_text("50 %")
    opened.evaluate(
        """() => {
            window.drawn = 0;
            const ask = window.requestAnimationFrame;
            window.requestAnimationFrame = (draw) => { window.drawn += 1; return ask(draw); };
        }"""
    )
    opened.wait_for_timeout(600)
    assert opened.evaluate("drawn") == 0


def test_many_ranks_fit(opened):
    ranks = [rank(number, number // 4, number % 4) for number in range(16)]
    come_back_to(opened, cluster(*ranks, num_layers=16))
    expect(opened.locator("#rows .name")).to_have_count(16)
    expect(opened.locator("#rows .stage")).to_have_count(4)
    expect(opened.locator("#ranks tbody tr")).to_have_count(16)
    expect(opened.locator("#ranks tbody tr").nth(5)).to_contain_text("1 · tp 1")
    assert picture(opened).bounding_box()["height"] < 660


def test_what_is_kept_is_bounded(opened):
    kept = opened.evaluate(
        """async () => {
            const { Timeline } = await import("/webui/cluster/timeline.js");
            const timeline = new Timeline(), second = 1e6, seen = [];
            const batch = (begin, many) => timeline.add({
                begin_us: begin, end_us: begin + second,
                steps: Array.from({ length: many }, (_, i) => ({ step: begin + i })),
                ranks: [0, 1].map((rank) => ({ rank, slices: Array.from({ length: many },
                    (_, i) => ["run", begin + i * second / many, begin + (i + 1) * second / many, begin + i]) })),
            });
            for (let at = 0; at < 100; at++) batch(at * second, 10);
            seen.push(timeline.slices(0).length, timeline.end - timeline.begin, timeline.step(5) === undefined);
            for (let at = 100; at < 120; at++) batch(at * second, 5000);
            seen.push(timeline.slices(0).length + timeline.slices(1).length, timeline.stepsIn().length, timeline._steps.size);
            return seen;
        }"""
    )
    assert kept == [600, 60_000_000, True, 50_000, 25_000, 25_000]


def test_slices_there_was_no_room_for_are_nobody_s_bubble(opened):
    """Rank 0 has told of 10 ms only, rank 1 of 20 ms."""
    whole = [("run", 0, 10 * MS, 1)], [("wait for activations", 0, 10 * MS, 1), ("run", 10 * MS, 20 * MS, 1)]
    see(opened, steps(0, 20 * MS, [step(1)], *whole) | {"dropped": 5}, span="50 ms")
    expect(opened.locator("#rows .share")).to_have_text(["0 % bubble", "100 % bubble"])
    untold = [("run", 60 * MS, 62 * MS, 7)], [("wait for activations", 60 * MS, 62 * MS, 7)]
    next_cut = [("run", 45 * MS, 50 * MS, 2)], [("wait for activations", 40 * MS, 50 * MS, 2)]
    push(opened, steps(40 * MS, 50 * MS, [step(2)], *next_cut))
    expect(opened.locator("#rows .share")).to_have_text(["0 % bubble", "100 % bubble"])  # of 15 ms
    news = steps(50 * MS, 62 * MS, [step(3)], [("run", 55 * MS, 56 * MS, 3), *untold[0]], untold[1])
    push(opened, news | {"dropped": 1})  # nothing will ever be told of step 7
    expect(opened.locator("#rows .share")).to_have_text(["60 % bubble", "100 % bubble"])  # 6 of 15 ms computed


def test_server_that_was_started_again_counts_from_0(opened):
    see(opened, TWO_STEPS, span="5 s")
    expect(opened.locator("#summary")).to_contain_text(", 2 steps")
    push(opened, steps(90 * MS, 95 * MS, [step(0)], [("run", 90 * MS, 95 * MS, 0)], []))
    expect(opened.locator("#summary")).to_contain_text("1 step")
    expect(opened.locator("#rows .share").first).to_have_text("0 % bubble")


def test_slices_that_come_late_find_their_place(opened):
    found = opened.evaluate(
        """async () => {
            const { Timeline } = await import("/webui/cluster/timeline.js");
            const timeline = new Timeline();
            timeline.add({ begin_us: 0, end_us: 10, steps: [{ step: 1 }], ranks: [{ rank: 0, slices: [["run", 6, 9, 1]] }] });
            timeline.add({ begin_us: 10, end_us: 20, steps: [], ranks: [{ rank: 0, slices: [["prepare", 4, 6, 1], ["run", 12, 15, 2]] }] });
            return [timeline.slices(0).map(({ begin }) => begin), timeline.covered, timeline.slicesOfStep(1).get(0).length];
        }"""
    )
    assert found == [[4, 6, 12], [[0, 20]], 2]


def test_span_follows_the_steps_until_it_is_chosen(opened):
    span, end, number = opened.get_by_label("Time span"), 0, 0
    for count, step_time, fitting in [(6, 3000, "30 s"), (30, 100, "1 s"), (60, 20, "200 ms"), (60, 2, "50 ms")]:
        for _ in range(count):
            begin, end, number = end, end + step_time * MS, number + 1
            push(opened, steps(begin, end, [step(number)], [("run", begin, end, number)], []))
        expect(picture(opened)).to_have_attribute("aria-valuemax", str(number))
        expect(span.locator("option:checked")).to_have_text(fitting)
    span.select_option(label="5 s")
    push(opened, steps(end, end + MS, [step(number + 1)], [("run", end, end + MS, number + 1)], []))
    expect(picture(opened)).to_have_attribute("aria-valuemax", str(number + 1))
    expect(span.locator("option:checked")).to_have_text("5 s")
