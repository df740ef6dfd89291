"""Drafts over HTTP: ``speculate``, the usage that tells of drafted tokens, and the metrics, of a server that drafts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

import pytest
from checkpoints import make_checkpoint
from mtp_checkpoints import add_mtp
from serving import Server, serving, wait_for

SPECULATION = json.dumps({"model": "demo-draft", "num_speculative_tokens": 4})
ASKED = {"messages": [{"role": "user", "content": "Count from 3 to 25."}], "temperature": 1.5, "seed": 3}


@dataclass
class Client:
    """Asks, and adds up what the usage of all answers tells of drafts."""

    server: Server
    told: Counter[str] = field(default_factory=Counter)

    def ask(self, **fields) -> tuple[str, dict]:
        """Text and usage of an answer."""
        status, body = self.server.post("/v1/chat/completions", ASKED | fields)
        assert status == 200, body
        self.add(body["usage"])
        return body["choices"][0]["message"]["content"], body["usage"]

    def add(self, usage: dict) -> None:
        self.told.update(usage.get("completion_tokens_details") or {})

    def check_metrics(self) -> None:
        """They are what the usage of all answers told."""
        accepted, rejected = (self.told[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected"))
        expected = {"draft": accepted + rejected, "accepted": accepted}

        def metrics() -> dict[str, float]:  # they come a moment after an answer
            return {kind: self.server.metric(f"vllm:spec_decode_num_{kind}_tokens_total") for kind in expected}

        wait_for(lambda: metrics() == expected, 10)


@pytest.fixture(scope="module")
def client():
    with serving("--dtype", "float32", "--num-kv-blocks", "256", "--speculative-config", SPECULATION) as server:
        yield Client(server)


def test_usage_tells_of_drafted_tokens(client):
    _, usage = client.ask()
    details = usage["completion_tokens_details"]
    assert 0 < details["accepted_prediction_tokens"] < usage["completion_tokens"]
    assert details["rejected_prediction_tokens"] > 0


def test_stream_ends_with_the_same_usage(client):
    text, usage = client.ask()
    options = {"max_tokens": None, "ignore_eos": False, "stream_options": {"include_usage": True}}
    stream = client.server.stream(ASKED | options).finish()
    deltas = [choice["delta"] for event in stream.events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert not any("tokens" in choice for event in stream.events for choice in event["choices"]), (
        "nobody asked for them"
    )
    last = stream.events[-1]["usage"]
    assert last["completion_tokens_details"] == usage["completion_tokens_details"]
    client.add(last)


def test_answer_lists_on_request_which_tokens_were_drafted(client):
    status, body = client.server.post("/v1/chat/completions", ASKED | {"return_drafted": True})
    assert status == 200, body
    (choice,), usage = body["choices"], body["usage"]
    client.add(usage)
    details, tokens = usage["completion_tokens_details"], choice["tokens"]
    drafted = [token["drafted"] for token in tokens]
    assert len(tokens) == usage["completion_tokens"] and sum(drafted) == details["accepted_prediction_tokens"]
    assert len(tokens) - sum(drafted) == details["steps"], "each step brings one that was not drafted"
    assert not drafted[0] and drafted != sorted(drafted), "they are told apart by their places"
    spelled = bytes(byte for token in tokens for byte in token["bytes"]).decode()
    assert spelled.startswith(choice["message"]["content"])
    options = {"max_tokens": None, "ignore_eos": False, "stream_options": {"include_usage": True}}
    stream = client.server.stream(ASKED | options | {"return_drafted": True}).finish()
    choices = [choice for event in stream.events for choice in event["choices"]]
    assert [token for choice in choices for token in choice.get("tokens", [])] == tokens
    client.add(stream.events[-1]["usage"])


def test_request_that_speculates_not_is_left_alone(client):
    text, usage = client.ask()
    alone, own_usage = client.ask(speculate=False)
    assert alone == text
    assert own_usage["completion_tokens"] == usage["completion_tokens"]
    assert not any("prediction" in name for name in own_usage.get("completion_tokens_details") or {})


def test_metrics_are_what_the_usage_of_all_answers_told(client):
    client.ask()
    client.ask(speculate=False)
    client.check_metrics()


def test_mtp_layer_drafts_for_answers_that_are_the_same_without(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "qwen3.5")
    add_mtp(directory, "qwen3.5", noise=0.3)
    flags = ["--model", directory, "--dtype", "float32", "--num-kv-blocks", "256", "--threads", "1"]
    config = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    with serving(*flags, "--speculative-config", config) as server:
        client, fields = Client(server), {"max_tokens": 40, "ignore_eos": True}
        text, usage = client.ask(**fields)
        details = usage["completion_tokens_details"]
        assert 0 < details["accepted_prediction_tokens"] < usage["completion_tokens"] == 40
        assert details["rejected_prediction_tokens"] > 0
        assert client.ask(speculate=False, **fields)[0] == text
        client.check_metrics()


def test_speculate_is_a_yes_or_no(client):
    reply = client.server.ask("POST", "/v1/chat/completions", ASKED | {"speculate": "never"})
    reply.check_error(400, "invalid_request_error", None)
    assert "speculate" in reply.error["message"]
