"""Replies read by LABInfer's parser, and by Transformers' on the whole text."""

from __future__ import annotations

import json
from functools import cache

from reply_samples import TOOLS
from transformers.utils.chat_parsing import ResponseParser

from labinfer.text.reply_format import load_built_in
from labinfer.text.reply_parser import ReplyParser
from labinfer.text.reply_parts import Event, Reply, join_events

built_in = cache(load_built_in)
"""A built-in format by its name."""


def events(name: str, pieces: list[str], prompt: str = "", **options) -> list[Event]:
    """The events of a reply in a format that comes in these pieces."""
    options = {"tools": TOOLS, "make_id": lambda: "an id"} | options
    parser = ReplyParser(built_in(name).template, prompt, **options)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def parse(name: str, text: str, prompt: str = "", **options) -> Reply:
    return join_events(events(name, [text], prompt, **options))


def check_every_cut(name: str, text: str, prompt: str = "") -> Reply:
    """The reply, which is the same wherever the text is cut in two, and letter by letter."""
    reply = parse(name, text, prompt)
    assert join_events(events(name, list(text), prompt)) == reply
    for cut in range(1, len(text)):
        assert join_events(events(name, [text[:cut], text[cut:]], prompt)) == reply
    return reply


def calls(reply: Reply) -> list[tuple[str, dict]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


def parts(reply: Reply) -> tuple[str, str, list]:
    """What ``oracle`` tells of a reply."""
    return reply.reasoning, reply.content.strip(), calls(reply)


def oracle(name: str, text: str, prompt: str = "", tools: list[dict] = TOOLS) -> tuple[str, str, list]:
    """Thoughts, content and calls of the whole text, by Transformers.

    They are taken from its events: in its message, regions that have only white space leave their ``join`` behind, which
    here nothing does. White space at the two ends of a reply is not compared for the same reason: Transformers drops it
    everywhere, and here a reply stays as it is where no region touches it (``test_plain_reply_is_kept_as_it_is``).
    """
    parser = ResponseParser(built_in(name).source, prefix=prompt, tools=tools)
    thoughts, content, functions = [], [], []
    for event in parser.feed(text) + parser.finalize()[1]:
        if event["type"] != "region_close" or not (value := event["value"]):
            continue
        if event["field"] == "tool_calls":
            functions += [call["function"] for call in (value if isinstance(value, list) else [value])]
        else:
            (thoughts if event["field"] in ("reasoning_content", "thinking") else content).append(value)
    found = [(function["name"], function.get("arguments", function.get("parameters"))) for function in functions]
    return "\n".join(thoughts), "\n".join(content), found
