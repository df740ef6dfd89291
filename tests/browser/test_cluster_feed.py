"""What the cluster page makes of news that are late, lost, from another server, or by a clock that was set back."""

from __future__ import annotations

import re

import pytest
from cluster_page import (
    BREAK_OFF,
    MS,
    START,
    cluster,
    come_back_to,
    picture,
    push,
    rank,
    see,
    stats,
    step,
    steps,
    wait_streams,
)
from playwright.sync_api import expect

SECOND = 1000 * MS
COUNT_ALERTS = """() => {
    fake.alerts = 0;
    const observer = new MutationObserver(() => fake.alerts += 1);
    for (const one of document.querySelectorAll("#lost, #state")) observer.observe(one, { childList: true, characterData: true });
}"""


def busy(number: int, begin: int, end: int, *others: list) -> dict:
    """Rank 0 works on one step from begin to end, in microseconds."""
    return steps(begin, end, [step(number)], [("run", begin, end, number)], *others)


@pytest.mark.slow
def test_server_without_news_of_the_cluster_is_not_asked_all_the_time(opened):
    """It takes requests, and has an error here: there is no other sign that trying again is of use."""
    opened.evaluate("() => { fake.failure = 'out of order'; fake.asked = 0; }")
    opened.evaluate(BREAK_OFF)
    expect(opened.locator("#state")).to_have_text("Disconnected")
    expect(opened.get_by_role("alert").filter(has_text="out of order")).to_be_visible()
    opened.evaluate(COUNT_ALERTS)
    opened.wait_for_timeout(3000)
    assert 1 <= opened.evaluate("fake.asked") <= 3
    assert opened.evaluate("fake.alerts") == 0, "a screen reader would read it out at every try"
    opened.evaluate("() => { fake.failure = null; }")
    wait_streams(opened, 1)
    expect(opened.locator("#state")).to_have_text("Idle")
    expect(opened.get_by_text("out of order")).to_be_hidden()


def test_trying_again_leaves_nothing_behind(opened):
    """A page may be open for days in front of a server that is off."""
    listeners = opened.evaluate(
        """async () => {
            const { Feed } = await import("/webui/cluster/feed.js");
            const { ApiFailure } = await import("/webui/api.js");
            const { addEventListener, removeEventListener } = AbortSignal.prototype;
            let listeners = 0, tries = 0;
            AbortSignal.prototype.addEventListener = function (...all) { listeners++; addEventListener.apply(this, all); };
            AbortSignal.prototype.removeEventListener = function (...all) { listeners--; removeEventListener.apply(this, all); };
            const api = { cluster: async () => { throw new ApiFailure("away"); } };
            const feed = new Feed(api, { closed: () => { tries++; setTimeout(() => feed.retry()); } });
            feed.follow("demo");
            while (tries < 20) await new Promise((resolve) => setTimeout(resolve, 5));
            feed.follow("");
            return listeners;
        }"""
    )
    assert listeners <= 1


def test_server_with_another_layout_begins_a_picture_of_its_own(opened):
    """Also where no number of a step tells that it was started again."""
    see(opened, busy(1, 0, 10 * MS, [("run", 0, 10 * MS, 1)]), span="5 s")
    expect(opened.locator("#rows .share")).to_have_text(["0 % bubble", "0 % bubble"])
    come_back_to(opened, cluster(rank(0, 0, num_layers=8)))
    expect(opened.locator("#rows .name")).to_have_count(1)
    push(opened, busy(2, SECOND, SECOND + 20 * MS))
    expect(opened.locator("#summary")).to_contain_text("1 step")
    expect(opened.locator("#overall")).to_have_text("0 %")


def test_loads_of_experts_are_drawn_and_asked_for_again(opened):
    expect(opened.locator("#experts")).to_be_hidden()
    reads = [
        {"rank": number, "hits": 30, "misses": 10, "bytes_read": 512, "stall_seconds": 0.5 * number}
        for number in (0, 1)
    ]
    layers = [{"layer": 1, "tokens": [6, 0, 3, 3]}, {"layer": 2, "tokens": [0, 0, 8, 0]}]
    come_back_to(opened, cluster(experts=layers, expert_reads=reads))
    said, drawn = opened.locator("#experts-say"), opened.locator("#experts-picture")
    expect(said).to_contain_text("busiest expert of a layer has 3 times the mean load; 4 of 8 experts had no tokens")
    expect(opened.locator("#experts-read")).to_have_text(
        re.compile("75 % hit rate in 80 lookups; 1 KiB read .* stalled for 500 ms")
    )
    box = drawn.bounding_box()
    drawn.hover(position={"x": box["width"] * 5 / 8, "y": box["height"] * 3 / 4})
    expect(said).to_have_text("Layer 2, expert 2: 8 tokens, 100 % of the layer")
    opened.evaluate("() => { fake.cluster.experts[1].tokens = [8, 8, 8, 8]; }")
    push(opened, stats(0, running=1, waiting=0), stats(1, running=0, waiting=0))
    expect(drawn).to_have_attribute("aria-label", re.compile("1 of 8"), timeout=10_000)


def test_server_that_was_started_again_while_it_worked(opened):
    """The first news have some numbers of steps that the last server had too, and some more."""
    see(opened, *[busy(at, at * 10 * MS, (at + 1) * 10 * MS) for at in range(3)], span="5 s")
    expect(opened.locator("#summary")).to_contain_text(", 3 steps")
    both = [("run", SECOND, SECOND + MS, 2), ("run", SECOND + MS, SECOND + 2 * MS, 3)]
    push(opened, steps(SECOND, SECOND + 2 * MS, [step(2), step(3)], both, []))
    expect(opened.locator("#summary")).to_contain_text(", 2 steps")


def test_moment_between_news_is_not_lost(opened):
    see(opened, busy(1, 0, 10 * MS), busy(2, 15 * MS, 20 * MS))
    expect(opened.locator("#summary")).to_contain_text(", 2 steps")
    expect(opened.locator("#rows .share").first).to_have_text("25 % bubble")  # of 20 ms


def test_clock_that_is_set_back(opened):
    see(opened, busy(1, 0, 10 * MS))
    push(opened, stats(0, running=7))
    expect(opened.locator("#charts figure").nth(4)).to_contain_text("7 running")
    expect(opened.locator("#summary")).to_contain_text("1 step")
    push(opened, stats(-3600, running=5), busy(2, -3600 * SECOND, -3600 * SECOND + 5 * MS))
    expect(opened.locator("#charts figure").nth(4)).to_contain_text("5 running")
    picture(opened).focus()
    opened.keyboard.press("End")
    expect(opened.locator("#step").get_by_role("heading")).to_have_text("Step 2")


@pytest.mark.slow
def test_long_step_is_work(opened):
    """Rank 0 tells nothing while it runs a long prompt."""
    push(opened, stats(0, running=1, waiting=0))
    expect(opened.locator("#state")).to_have_text("Live")
    opened.wait_for_timeout(4500)
    expect(opened.locator("#state")).to_have_text("Live")
    opened.evaluate("(cluster) => { fake.cluster = cluster; }", cluster(history=[stats(4, running=1)]))
    opened.evaluate(BREAK_OFF)
    wait_streams(opened, 1)
    expect(opened.locator("#state")).to_have_text("Live")  # before any news
    push(opened, stats(5, running=0, waiting=0))
    expect(opened.locator("#state")).to_have_text("Idle")


def test_model_at_rest_beside_one_at_work(opened):
    """Figures of all models come as long as one of them works."""
    push(opened, stats(0, running=1, waiting=0))
    expect(opened.locator("#state")).to_have_text("Live")
    for at in range(1, 8):
        push(opened, stats(at / 2, running=0, waiting=0))
        opened.wait_for_timeout(400)
    assert opened.locator("#state").text_content() == "Idle"


def test_time_goes_on_in_the_charts_at_rest(opened):
    found = opened.evaluate(
        """async (start) => {
            const { History } = await import("/webui/cluster/history.js");
            let now = 1e6;
            const history = new History(() => now), minute = 60e6, seen = [];
            const point = (time_us) => ({ time_us, seconds: 0.5, steps_per_second: 1, tokens_per_step: 1, prompt_tokens_per_second: 0,
                generation_tokens_per_second: 1, running: 1, waiting: 0 });
            const look = () => seen.push([(history.end - start) / minute, history.runs(({ running }) => running).flat().length]);
            history.add([point(start), point(start + 10e6)], start + minute);
            look();
            now += 3 * 60_000;
            look();
            now += 2 * 60_000;
            look();
            history.add([point(start + 6.5 * minute)]);
            look();
            return seen;
        }""",
        START,
    )
    assert found == [[1, 2], [4, 2], [6, 0], [6.5, 1]]


def test_history_of_an_hour_is_coarser_before_the_last_minutes(opened):
    """One point a second, with a pause of a minute in the middle: merged points keep rates and gaps."""
    counts = opened.evaluate(
        """async (start) => {
            const { History } = await import("/webui/cluster/history.js");
            const history = new History(() => 0), minute = 60e6;
            const point = (second) => ({ time_us: start + second * 1e6, seconds: 1, steps_per_second: second % 2 ? 3 : 1, tokens_per_step: 4,
                prompt_tokens_per_second: 0, generation_tokens_per_second: 5, running: 1, waiting: 0, ranks: [{ rank: 0, busy: second % 2 }] });
            for (let second = 0; second < 4000; second++) if (second < 2000 || second >= 2060) history.add([point(second)]);
            const rate = (point) => point.steps_per_second, found = [];
            for (const minutes of [5, 60]) {
                history.range = minutes * minute;
                const runs = history.runs(rate);
                found.push([runs.length, runs.flat().length, runs.flat()[9][1]]);
            }
            const old = history.points[20], { time_us, tokens_per_step, generation_tokens_per_second, ranks } = old;
            return [...found, [tokens_per_step, generation_tokens_per_second, ranks[0].busy], history.nearest(time_us - 7e6) === old];
        }""",
        START,
    )
    assert counts[0][0] == 1 and counts[0][1] in (300, 301) and counts[0][2] in (1, 3)
    assert counts[1][0] == 2 and 620 <= counts[1][1] <= 650 and counts[1][2] == 2
    assert counts[2:] == [[4, 5, 0.5], True]


def test_range_of_the_history_can_be_chosen(opened):
    push(opened, *[stats(20 * number, seconds=20, generation_tokens_per_second=number) for number in range(60)])
    chart = opened.locator("#charts figure").nth(3).get_by_role("img")
    expect(chart).to_have_attribute("aria-label", re.compile("maximum 59 in the last 5 minutes"))
    points = chart.locator(".curve").first.get_attribute("d").count("L")
    opened.get_by_label("Range").select_option(label="Last hour")
    expect(chart).to_have_attribute("aria-label", re.compile("maximum 59 in the last hour"))
    assert chart.locator(".curve").first.get_attribute("d").count("L") > 3 * points
    expect(opened.locator("#ranks tbody tr").first.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile("in the last hour")
    )
