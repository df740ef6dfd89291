"""The cluster page, for tests: news of ranks that are made up, and what is seen of them."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator, Page
from serving import wait_for

Event = dict[str, Any]

MS = 1000
"""In microseconds."""
START = 1_700_000_000_000_000
"""When the made-up news begin, in microseconds since 1970."""

FAKE_FEED = """
window.fake = { cluster: %CLUSTER%, streams: [], asked: 0, opened: 0, failure: null, requests: [], cancelled: [], refusal: null };
fake.push = (event) => fake.streams.at(-1).enqueue(new TextEncoder().encode(`data: ${JSON.stringify(event)}\\n\\n`));
const realFetch = window.fetch;
window.fetch = async (url, options = {}) => {
    const { pathname } = new URL(url, location.href);
    if (pathname === "/v1/models" && fake.models) return Response.json({ data: fake.models.map((id) => ({ id })) });
    if (pathname === "/v1/requests") {
        const running = fake.requests.filter(({ state }) => state === "running").length;
        return Response.json({ object: "list", data: fake.requests, total: fake.requests.length, running });
    }
    if (pathname.startsWith("/v1/requests/")) {
        if (fake.refusal) return Response.json({ error: { message: fake.refusal } }, { status: 500 });
        fake.cancelled.push(pathname.split("/")[3]);
        fake.requests = fake.requests.filter(({ id }) => !fake.cancelled.includes(id));
        return Response.json({});
    }
    if (!pathname.startsWith("/v1/cluster")) return realFetch(url, options);
    if (pathname === "/v1/cluster") {
        fake.asked += 1;
        return fake.failure ? Response.json({ error: { message: fake.failure } }, { status: 500 }) : Response.json(fake.cluster);
    }
    fake.opened += 1;
    return new Response(new ReadableStream({
        start(controller) {
            fake.streams.push(controller);
            options.signal.addEventListener("abort", () => {
                fake.streams.splice(fake.streams.indexOf(controller), 1);
                controller.error(options.signal.reason);
            });
        },
    }));
};
"""
"""In place of the server's routes of the cluster: a feed that the test fills by ``fake.push``."""
BREAK_OFF = "() => fake.streams.splice(0).forEach((stream) => stream.close())"


def rank(number: int, stage: int, tp_rank: int = 0, **fields: Any) -> Event:
    return {
        "rank": number,
        "stage": stage,
        "tp_rank": tp_rank,
        "host": f"node-{stage}",
        "device": "cpu",
        "threads": 1,
        "cpus": str(number),
        "first_layer": 4 * stage,
        "num_layers": 4,
        "dtype": "bfloat16",
        "quantization": "none",
        "kv_dtype": "bfloat16",
        "weight_bytes": 3 << 20,
        "kv_bytes": 96 << 20,
    } | fields


def cluster(*ranks: Event, **fields: Any) -> Event:
    """What ``/v1/cluster`` answers; by default of two stages."""
    return {
        "object": "cluster",
        "time_us": START,
        "model": "demo",
        "num_layers": 8,
        "block_size": 16,
        "num_blocks": 8192,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "stage_latency_seconds": 0.0001,
        "pipeline_schedule": "1f1b",
        "ranks": list(ranks) or [rank(0, 0), rank(1, 1)],
        "links": [],
        "stages": [],
        "machine_links": [],
        "plan": None,
        "bottleneck": None,
        "history": [],
    } | fields


def stats(at: float, **fields: Any) -> Event:
    """A stats event, ``at`` seconds after the start; its rates cover half a second."""
    return {
        "object": "cluster.stats",
        "time_us": START + int(at * 1e6),
        "seconds": 0.5,
        "running": 3,
        "waiting": 1,
        "sequences": 3,
        "ttft": {"p50": 0.12, "p99": 0.4},
        "time_per_output_token": {"p50": 0.0125, "p99": 0.025},
        "queue_time": None,
        "prefix_cache_hit_rate": 0.75,
        "preemptions": 2,
        "kv_usage": 0.25,
        "steps_per_second": 88.0,
        "tokens_per_step": 17.5,
        "prompt_tokens_per_second": 40.0,
        "generation_tokens_per_second": 1234.0,
        "ranks": [
            {"rank": number, "busy": 0.5, "private_memory": 200 << 20, "memory_used": 6 << 30, "memory_total": 16 << 30}
            for number in (0, 1)
        ],
        "links": [],
        "stages": [],
        "bottleneck": None,
    } | fields


def step(number: int, prefill: int = 0, decode: int = 1) -> Event:
    """A micro-batch of one prompt or none, and so many decoding sequences."""
    sequences = [{"request": f"chatcmpl-{i}", "tokens": 1, "context": 100 + i, "decode": True} for i in range(decode)]
    if prefill:
        sequences.append({"request": "chatcmpl-new", "tokens": prefill, "context": 0, "decode": False})
    return {
        "step": number,
        "prefill_tokens": prefill,
        "decode_tokens": decode,
        "num_sequences": len(sequences),
        "sequences": sequences,
    }


def steps(begin: int, end: int, told: list[Event], *slices_of_rank: list[tuple[str, int, int, int]]) -> Event:
    """An event of slices; their times are in microseconds after the start."""
    return {
        "object": "cluster.steps",
        "begin_us": START + begin,
        "end_us": START + end,
        "dropped": 0,
        "steps": told,
        "ranks": [
            {"rank": number, "slices": [[name, START + a, START + b, of] for name, a, b, of in slices]}
            for number, slices in enumerate(slices_of_rank)
        ],
    }


def wait_streams(page: Page, count: int) -> None:
    """Until so many are open."""
    wait_for(lambda: page.evaluate("fake.streams.length") == count, 10)


def push(page: Page, *events: Event) -> None:
    for event in events:
        page.evaluate("(event) => fake.push(event)", event)


def see(page: Page, *events: Event, span: str = "20 ms") -> None:
    """With so much time in view."""
    page.get_by_label("Time span").select_option(label=span)
    push(page, *events)


def hide(page: Page, hidden: bool) -> None:
    """As when another tab is looked at."""
    page.evaluate(
        """(hidden) => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def come_back_to(page: Page, told: Event) -> None:
    """Look at another tab and back: the page asks for the cluster, of which this is told from now on."""
    page.evaluate("(cluster) => { fake.cluster = cluster; }", told)
    hide(page, True)
    wait_streams(page, 0)
    hide(page, False)
    wait_streams(page, 1)


def picture(page: Page) -> Locator:
    return page.get_by_role("slider", name="Pipeline timeline")


def details(page: Page) -> Locator:
    """Of the step that is selected."""
    return page.locator("#step")


def colour_at(page: Page, x: float, y: float) -> list[int]:
    """Red, green and blue of a point of the picture, in CSS pixels from its corner."""
    return page.evaluate(
        """([x, y]) => {
            const canvas = document.getElementById("gantt"), density = canvas.width / canvas.clientWidth;
            return [...canvas.getContext("2d").getImageData(x * density, y * density, 1, 1).data].slice(0, 3);
        }""",
        [x, y],
    )


def theme_colour(page: Page, name: str) -> list[int]:
    """A colour of the styles."""
    text = page.evaluate("(name) => getComputedStyle(document.documentElement).getPropertyValue(name)", f"--{name}")
    return [int(text.strip()[at : at + 2], 16) for at in (1, 3, 5)]
