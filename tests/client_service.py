"""The server that the suites of tests/clients ask: started once for all of them, with a key and two models."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launchers import ROOT
from serving import Server, serving

KEY = "key-for-clients"
MODEL = "demo"
THINKER = "thinker"
"""The same model behind a chat template that opens a thought."""
QUESTION = "17 + 25 = ?"
TOO_LONG = "red blue " * 3000
"""Longer than the model's context."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""Arguments of a tool. They are bounded: the model was never trained to call any."""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s", "days": %d}}\n</tool_call>'
TWO_CALLS = CALL % ("Rome", 1) + "\n" + CALL % ("Oslo", 2)
DEMO = ROOT / "labinfer" / "assets" / "demo"
OPENS_A_THOUGHT = "{% if add_generation_prompt and enable_thinking|default(true) %}{{ '<think>\n' }}{% endif %}"
FAILED = re.compile(r"status=5\d\d|Traceback")


def writing(text: str) -> dict:
    """The field of a request beside OpenAI's that makes the model write this, as one with more training would by itself."""
    return {"structured_outputs": {"choice": [text]}}


@contextmanager
def client_service(*flags: str, launcher: str = "single", ranks: int = 1) -> Iterator[Server]:
    """A server with both models; afterwards its log must have no failure of its own."""
    with tempfile.TemporaryDirectory() as directory:
        write_thinker(Path(directory))
        models = ("--model", f"{MODEL}=demo", "--model", f"{THINKER}={directory}")
        with serving(*models, "--dtype", "float32", "--api-key", KEY, *flags, launcher=launcher, ranks=ranks) as server:
            yield server
            server.wait_idle(key=KEY)
            check_log(server)


def write_thinker(directory: Path) -> None:
    """The demo with another chat template."""
    for path in DEMO.iterdir():
        (directory / path.name).symlink_to(path)
    config = directory / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["chat_template"] += OPENS_A_THOUGHT
    config.unlink()
    config.write_text(json.dumps(fields), encoding="utf-8")


def check_log(server: Server) -> None:
    """No answer with a status of 500 and above, and no exception."""
    bad = [line for line in server.lines if FAILED.search(line)]
    assert not bad, bad
