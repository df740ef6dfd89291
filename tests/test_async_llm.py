"""``AsyncLLM``: requests at the same time, from any event loop, each ended by whoever no longer wants it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from checkpoints import make_checkpoint, mixed_prompts, transformers_greedy

from labinfer import AsyncLLM, SamplingParams, UserError

SMALL = {"block_size": 4, "num_kv_blocks": 400, "max_num_batched_tokens": 32, "max_num_seqs": 4, "threads": 1}
PROMPTS = mixed_prompts(4)
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
CHAT = [{"role": "user", "content": "the lazy dog"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("async") / "model", "llama-untied")


@pytest.fixture(scope="module")
def expected(checkpoint):
    return [answer["token_ids"] for answer in transformers_greedy(checkpoint, PROMPTS, NUM_TOKENS)]


@pytest.fixture(scope="module")
def llm(checkpoint):
    llm = AsyncLLM(checkpoint, **SMALL)
    yield llm
    asyncio.run(llm.close())


async def idle(llm: AsyncLLM) -> None:
    """Wait until every block is free."""
    blocks, deadline = llm._llm.engine.blocks, time.monotonic() + 10
    while llm._llm.engine.has_work or blocks.num_free < blocks.num_blocks:
        assert time.monotonic() < deadline, "requests go on that nobody waits for"
        await asyncio.sleep(0.01)


async def collect(llm: AsyncLLM, prompt, order: list | None = None) -> list[int]:
    token_ids = []
    async for delta in llm.stream(prompt, GREEDY):
        token_ids += delta.token_ids
        if order is not None:
            order.append(prompt)
    return token_ids


def test_streams_come_side_by_side(llm, expected):
    order: list = []

    async def run() -> list:
        return await asyncio.gather(*(collect(llm, prompt, order) for prompt in PROMPTS))

    assert asyncio.run(run()) == expected
    assert sum(before != after for before, after in zip(order, order[1:], strict=False)) > len(PROMPTS)


def test_whole_outputs_chats_and_vectors(llm, expected):
    async def run() -> None:
        outputs = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS))
        assert [output.token_ids for output in outputs] == expected
        chat, messages = await asyncio.gather(llm.chat(CHAT, GREEDY), llm.generate(CHAT, GREEDY))
        assert chat.text == messages.text
        vector = await llm.embed(PROMPTS[0])
        assert sum(number * number for number in vector.embedding) == pytest.approx(1)
        stopped = await llm.generate(CHAT, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, stop=chat.text[3:5]))
        assert stopped.finish_reason == "stop" and chat.text.startswith(stopped.text)
        await idle(llm)

    asyncio.run(run())


@pytest.mark.parametrize("way", ["break", "task", "loop"])
def test_requests_end_with_whoever_waits_for_them(llm, way, expected):
    async def read() -> None:
        async for _ in llm.stream("the", LONG):
            if way == "break":
                break

    async def run() -> None:
        reading = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        if way == "task":
            reading.cancel()
        if way != "loop":
            await asyncio.wait([reading])
            await idle(llm)

    asyncio.run(run())
    asyncio.run(idle(llm))
    assert asyncio.run(collect(llm, PROMPTS[0])) == expected[0]


def test_several_event_loops_at_once(llm, expected):
    """As a notebook's, and that of a page that was started in it."""
    outputs: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=n: outputs.update({n: asyncio.run(collect(llm, PROMPTS[n]))}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [outputs[n] for n in range(4)] == expected


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", None, "the prompt is empty"),
        ([5, 512], None, "token id 512 is outside the vocabulary"),
        ({"text": "x"}, None, "a prompt has no key 'text'"),
        ("the", SamplingParams(num_beams=2), "cannot stream"),
    ],
)
def test_what_is_wrong_is_said(llm, prompt, params, message):
    async def run() -> None:
        async for _ in llm.stream(prompt, params):
            raise AssertionError("something came")

    with pytest.raises(UserError, match=message):
        asyncio.run(run())


def test_closing_ends_what_is_open(checkpoint):
    async def run() -> None:
        async with AsyncLLM(checkpoint, **SMALL) as llm:
            open_call = asyncio.create_task(llm.generate("the", LONG))
            await asyncio.sleep(0.05)
        with pytest.raises(UserError, match="AsyncLLM (was|is) closed"):
            await open_call
        with pytest.raises(UserError, match="closed"):
            await llm.generate("the")
        await llm.close()

    num_before = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() == num_before


def test_engine_that_fails_tells_all_who_wait(checkpoint, monkeypatch, caplog):
    async def run() -> None:
        llm = AsyncLLM(checkpoint, **SMALL)
        monkeypatch.setattr(llm._llm._executor, "wait_result", lambda: 1 / 0)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match="the engine has failed with ZeroDivisionError: .* create a new AsyncLLM"
            ):
                await llm.generate("the", GREEDY)
        await llm.close()

    asyncio.run(run())
