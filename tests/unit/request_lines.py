"""Lines of a job as tests write them."""

from __future__ import annotations

import json

from labinfer.base.sampling_params import SamplingParams
from labinfer.requests.jsonl import parse_line
from labinfer.requests.protocol import CHAT_URL, COMPLETIONS_URL

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5, stop=("END",), seed=3)


def parse(line, defaults=DEFAULTS):
    return parse_line(line if isinstance(line, bytes) else json.dumps(line).encode(), defaults)


def batch(body, url=COMPLETIONS_URL, **other):
    return {"custom_id": "c-1", "method": "POST", "url": url, "body": body} | other


def chat(content, **body):
    return batch({"messages": [{"role": "user", "content": content}]} | body, CHAT_URL)
