"""The server as its users meet it: many at once, on two pipeline stages, against what the same model says offline."""

from __future__ import annotations

import asyncio
import json
import random
import time

import httpx
import pytest
from serving import Server, serving

from labinfer import LLM, SamplingParams

NUM_USERS = 32
FLAGS = ("--dtype", "float32", "--num-kv-blocks", "2048")


@pytest.fixture(scope="module", params=["mpirun", pytest.param("torchrun", marks=pytest.mark.slow)])
def server(request):
    with serving("-pp", "2", *FLAGS, launcher=request.param, ranks=2) as server:
        yield server


def bodies(count: int) -> list[dict]:
    """Chat requests of many kinds, each of which always has the same answer."""
    draw = random.Random(5)
    words = ["red", "blue", "seven", "translate", "中文", "sort", "hello", "sum", "cat", "ocean"]
    return [
        {
            "model": "demo",
            "messages": [{"role": "user", "content": " ".join(draw.choices(words, k=draw.randint(1, 30)))}],
            "max_tokens": draw.randint(1, 40),
            "temperature": draw.choice([0.0, 0.7, 1.5]),
            "seed": draw.randrange(1000),
            "n": draw.choice([1, 1, 1, 2]),
            "top_k": -1,  # the model recommends less to who asks a server
            "top_p": 1.0,
        }
        for _ in range(count)
    ]


def offline_texts(requests: list[dict]) -> list[list[str]]:
    fields = ("max_tokens", "temperature", "seed", "n", "top_k", "top_p")
    with LLM("demo", dtype="float32") as llm:
        params = [SamplingParams(**{name: body[name] for name in fields}) for body in requests]
        outputs = llm.generate([{"messages": body["messages"]} for body in requests], params)
        return [[completion.text for completion in output.completions] for output in outputs]


async def stream_texts(client: httpx.AsyncClient, body: dict) -> list[str]:
    """The texts of one streamed answer, held to the letter of the format as they come."""
    texts = [""] * body["n"]
    finished: list[int] = []
    roles: list[int] = []
    is_done = False
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                assert not line or line.startswith(":"), line
                continue
            assert not is_done, "something came after [DONE]"
            if line == "data: [DONE]":
                is_done = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                index, delta = choice["index"], choice["delta"]
                if "role" in delta:
                    roles.append(index)
                assert index in roles, "text before the role"
                assert index not in finished, "text after the finish reason"
                texts[index] += delta.get("content") or ""
                if choice["finish_reason"] is not None:
                    finished.append(index)
    assert is_done
    assert sorted(roles) == sorted(finished) == list(range(body["n"]))
    return texts


def test_many_users_at_once_get_what_they_would_get_alone(server: Server):
    requests = bodies(NUM_USERS)

    async def all_at_once() -> list[list[str]]:
        limits = httpx.Limits(max_connections=NUM_USERS)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(stream_texts(client, body) for body in requests))

    assert asyncio.run(all_at_once()) == offline_texts(requests)
    server.wait_idle()


def test_cancelled_requests_leave_no_block_behind(server: Server):
    """Half of 64 are given up at random moments: by closing the connection, or by asking for the end."""
    draw = random.Random(7)

    async def one(client: httpx.AsyncClient, number: int) -> str:
        body = {
            "messages": [{"role": "user", "content": f"count {number}"}],
            "max_tokens": 200,
            "temperature": 1.5,
            "top_k": -1,
            "top_p": 1.0,  # tokens that have text, behind the end, too: chunks to count
            "stream": True,
            "ignore_eos": True,
        }
        how = ("finish", "close", "finish", "cancel")[number % 4]
        stop_after = draw.randint(0, 100)
        ended = ""
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"x-request-id": f"r{number}"}
        ) as response:
            chunks = 0
            async for line in response.aiter_lines():
                chunks += line.startswith("data: ")
                if line == "event: error":
                    ended = "error"
                if chunks > stop_after and how == "close":
                    return "closed"
                if chunks > stop_after and how == "cancel":
                    how = "cancelled"
                    answer = await client.post(f"/v1/requests/chatcmpl-r{number}/cancel")
                    assert answer.status_code in (200, 404), answer.text
                if line == "data: [DONE]":
                    ended = ended or "finished"
        return ended

    async def all_at_once() -> list[str]:
        limits = httpx.Limits(max_connections=128)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    endings = asyncio.run(all_at_once())
    assert endings.count("finished") >= 32
    assert "closed" in endings and "error" in endings
    server.wait_idle()
    status, answer = server.post("/v1/completions", {"prompt": "after that", "max_tokens": 3})
    assert status == 200, answer


@pytest.mark.timing
def test_gateway_answers_at_once_while_the_engine_is_saturated(server: Server):
    async def measure() -> list[float]:
        limits = httpx.Limits(max_connections=128)
        times = []
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            body = {"prompt": list(range(10, 400)), "max_tokens": 400, "ignore_eos": True}
            load = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(64)]
            await asyncio.sleep(0.2)
            while not all(task.done() for task in load) and len(times) < 100:
                for path in ("/health", "/v1/models"):
                    begin = time.perf_counter()
                    assert (await client.get(path)).status_code == 200
                    times.append(time.perf_counter() - begin)
                await asyncio.sleep(0.01)
            for task in load:
                assert (await task).status_code == 200
        return times

    times = sorted(asyncio.run(measure()))
    assert len(times) >= 20, "the load was over too soon to measure anything"
    assert times[int(len(times) * 0.95)] < 0.05, times[-10:]


def test_conversation_finds_its_earlier_turns_in_the_cache(server: Server):
    messages = [{"role": "user", "content": "Tell me about the sea, please. " * 8}]
    first = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 20, "temperature": 0})[1]
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And the sky?"}]
    second = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 0})[1]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 16, second["usage"]
