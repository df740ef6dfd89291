"""A tokenizer that has the marks of all formats of replies as tokens, some of them special."""

from __future__ import annotations

import json
from pathlib import Path

from labinfer.weights.resolve import resolve_model

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
MARKS += ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
MARKS += ["<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"]
MARKS += ["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"]
MARKS += ["｜DSML｜", "<response>", "</response>", *HARMONY]
SPECIAL = {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", *HARMONY}
CHAT = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
CHAT += "<|im_start|>assistant\n{% if thinking %}<think>\n{% endif %}"


def write_tokenizer(directory: Path, chat_template: str, **config) -> Path:
    """The demo's tokenizer with the marks of all formats as tokens."""
    demo = resolve_model("demo", "", may_download=False)
    vocabulary = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    like, first = vocabulary["added_tokens"][0], len(vocabulary["model"]["vocab"])
    vocabulary["added_tokens"] += [
        like | {"id": first + index, "content": mark, "special": mark in SPECIAL} for index, mark in enumerate(MARKS)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    whole = json.loads((demo / "tokenizer_config.json").read_text()) | {"chat_template": chat_template} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(whole), encoding="utf-8")
    return directory
