"""Streams of all kinds at once, which have to come to the same answers whatever happens to the ranks meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from serving import Server

TOOL = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "^[a-z ]{400}$"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
REQUESTS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.5},
    "guided": {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-z ]{700}"}},
    "two answers": {"temperature": 1.0, "seed": 5, "n": 2},
    "log-probabilities": {"logprobs": 2},
    "tools": {
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
        "temperature": 1.0,
        "seed": 9,
    },
}
NUM_STREAMS = 16


def ask_all(server: Server, max_tokens: int = 300) -> list:
    """So many streams at once, of each kind some; what came of each."""

    def ask(number: int) -> dict:
        fields = list(REQUESTS.values())[number % len(REQUESTS)]
        if "seed" in fields:
            fields = fields | {"seed": fields["seed"] + number}
        has_form = bool({"structured_outputs", "tools"} & set(fields))  # which says itself where to end
        stream = server.stream({"max_tokens": max_tokens, "ignore_eos": not has_form} | fields).finish(90)
        assert stream.status == 200 and stream.error is None, stream.lines
        answers: dict = {}
        for choice in (choice for event in stream.events for choice in event.get("choices", ())):
            text, measured = answers.setdefault(choice["index"], ([], []))
            text.append(choice["text"] if "text" in choice else chat_text(choice["delta"]))
            measured += (choice.get("logprobs") or {}).get("tokens", ())
        assert ("tools" in fields) == ("get_weather" in "".join(answers[0][0])), answers
        return {index: ("".join(text), measured) for index, (text, measured) in answers.items()}

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        return list(threads.map(ask, range(NUM_STREAMS)))


def chat_text(delta: dict) -> str:
    """Content of a piece of a chat answer, and what it has of calls."""
    calls = [call["function"] for call in delta.get("tool_calls") or ()]
    return (delta.get("content") or "") + "".join(
        call.get(key) or "" for call in calls for key in ("name", "arguments")
    )
