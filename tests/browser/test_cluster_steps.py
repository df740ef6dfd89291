"""Steps of the cluster page that are chosen and read, of news that are made up."""

from __future__ import annotations

from cluster_page import MS, details, picture, push, see, step, steps
from playwright.sync_api import expect


def after(number: int) -> dict:
    """A step of 10 ms on both ranks, the first one at once."""
    begin = number * 10 * MS
    return steps(
        begin,
        begin + 10 * MS,
        [step(number)],
        [("run", begin, begin + 5 * MS, number)],
        [("run", begin + 5 * MS, begin + 10 * MS, number)],
    )


def test_what_was_pressed_is_selected_though_the_picture_moves_on(opened):
    see(opened, *[after(at) for at in range(2)])
    expect(opened.locator("#summary")).to_contain_text(", 2 steps")
    box = picture(opened).bounding_box()
    opened.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 48)
    opened.mouse.down()
    push(opened, *[after(at) for at in range(2, 6)])
    expect(picture(opened)).to_have_attribute("aria-valuemax", "5")
    opened.mouse.up()
    expect(details(opened).get_by_role("heading")).to_have_text("Step 0")


def test_selected_step_stays_in_view_when_less_time_is(opened):
    see(opened, *[after(at) for at in range(100)], span="1 s")
    expect(opened.locator("#summary")).to_contain_text(", 100 steps")
    picture(opened).focus()
    opened.keyboard.press("Home")
    expect(details(opened).get_by_role("heading")).to_have_text("Step 0")
    opened.get_by_label("Time span").select_option(label="20 ms")
    expect(opened.locator("#summary")).to_contain_text("20 ms")
    opened.locator("#steps summary").click()
    expect(opened.get_by_role("button", name="0", exact=True)).to_have_attribute("aria-pressed", "true")


def test_who_reads_the_table_has_it_stand_still(opened):
    see(opened, *[after(at) for at in range(30)], span="200 ms")
    expect(opened.locator("#summary")).to_contain_text(", 20 steps")
    opened.locator("#steps summary").click()
    expect(opened.locator("#state")).to_have_text("Paused")
    opened.get_by_role("button", name="15", exact=True).click()
    expect(details(opened).get_by_role("heading")).to_have_text("Step 15")
    details(opened).get_by_role("button", name="Close").press("Escape")
    expect(details(opened)).to_be_hidden()
    expect(opened.locator("#state")).to_have_text("Paused")  # the table is read still
    opened.locator("#steps summary").click()
    expect(opened.locator("#state")).not_to_have_text("Paused")
    opened.locator("#steps summary").click()
    opened.get_by_role("button", name="Resume").click()
    expect(opened.locator("#steps table")).to_be_hidden()
    expect(opened.locator("#state")).not_to_have_text("Paused")


def test_table_stands_still_when_work_comes_after_it_was_opened(opened):
    opened.locator("#steps summary").click()
    expect(opened.locator("#state")).not_to_have_text("Paused")  # there is nothing to read
    push(opened, after(0))
    expect(opened.locator("#state")).to_have_text("Paused")


def test_table_stays_where_it_was_scrolled_to(opened):
    see(opened, *[after(at) for at in range(60)], span="1 s")
    expect(opened.locator("#summary")).to_contain_text(", 60 steps")
    opened.locator("#steps summary").click()
    table = opened.locator("#steps .scrolled")
    expect(opened.locator("#state")).to_have_text("Paused")
    table.evaluate("(one) => { one.scrollTop = 300; }")
    picture(opened).focus()
    opened.keyboard.press("End")
    expect(table.get_by_role("button", name="59", exact=True)).to_have_attribute("aria-pressed", "true")
    assert table.evaluate("(one) => one.scrollTop") == 300


def test_step_of_the_table_is_brought_into_sight(opened):
    opened.set_viewport_size({"width": 390, "height": 500})
    see(opened, *[after(at) for at in range(30)], span="200 ms")
    expect(opened.locator("#summary")).to_contain_text(", 20 steps")
    opened.locator("#steps summary").click()
    opened.get_by_role("button", name="29", exact=True).click()
    expect(details(opened).get_by_role("heading", name="Step 29")).to_be_in_viewport(ratio=1)
    header = opened.locator("header").bounding_box()
    assert details(opened).bounding_box()["y"] >= header["y"] + header["height"]


def test_times_of_a_step_are_all_there(opened):
    """From its first moment to the last one, which is when rank 0 has its tokens."""
    first = [("prepare", 0, 1 * MS, 1), ("run", 1 * MS, 4 * MS, 1), ("wait for tokens", 6 * MS, 9 * MS, 1)]
    see(opened, steps(0, 9 * MS, [step(1, prefill=1, decode=0)], first, [("run", 4 * MS, 6 * MS, 1)]))
    expect(opened.locator("#summary")).to_contain_text("1 step")
    picture(opened).focus()
    opened.keyboard.press("End")
    expect(details(opened)).to_contain_text("1 sequence, 1 prompt token, 9 ms end to end, 6 ms of compute")
    times = details(opened).get_by_role("table", name="Time per rank").get_by_role("row")
    expect(times).to_have_text(
        ["RankStageStartPrepare inputsForward passWait for tokens", "00+01 ms3 ms3 ms", "11+4 ms–2 ms–"]
    )


def test_numbers_are_short_with_one_unit(opened):
    found = opened.evaluate(
        """async () => {
            const { short } = await import("/webui/cluster/units.js");
            const { roundUp } = await import("/webui/cluster/geometry.js");
            return [[0, 1.234, 12.34, 1234, 12345, 12345678].map(short), [1, 3, 5, 7, 9, 58].map(roundUp)];
        }"""
    )
    assert found == [
        ["0", "1.23", "12.3", "1234", "12.3k", "12.3M"],
        [1, 4, 6, 8, 10, 60],
    ]  # halves of an axis are whole
