"""The end of a streamed response that fails."""

from __future__ import annotations

import asyncio
import json

from labinfer.base.sampling_params import SamplingParams
from labinfer.requests.openai.response_body import ResponseBody
from labinfer.requests.openai.response_events import ResponseWriter
from labinfer.requests.openai.responses import new_response
from labinfer.server.gateway.event_stream import EventStream, StreamForm, named_event
from labinfer.server.gateway.routes.responses import ResponseAnswer


def test_stream_that_fails_by_whatever_ends_as_responses_do():
    answer = ResponseAnswer.__new__(ResponseAnswer)
    body = ResponseBody(input="hi")
    answer._writer = ResponseWriter(new_response("resp_1", 1, "m", body, SamplingParams()), None)
    sent = []

    async def events():
        for event in answer._writer.begin():
            yield named_event(event)
        raise RuntimeError("a bug")

    async def send(message):
        sent.append(message.get("body", b""))

    async def run():
        stream = EventStream(events(), {}, lambda: None, lambda: None, form=StreamForm(end=b"", error=answer.failure))
        await stream({}, lambda: asyncio.Event().wait(), send)

    asyncio.run(run())
    told = [json.loads(line[6:]) for line in b"".join(sent).decode().splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in told] == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in told] == [0, 1, 2]
    assert told[-1]["response"]["error"]["code"] == "server_error" and "bug" not in json.dumps(told)
