"""Conversation: the messages of a chat, and the sampling settings of further answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.sampling_options import sampling_sections
from labinfer.base.sampling_params import SamplingParams

MANY_ANSWERS = ("n", "num_beams", "length_penalty")
"""Sampling parameters that are no settings of a chat: they ask for several answers, or for answers that cannot be streamed."""
WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def settings() -> dict[str, type]:
    """Settings of a chat by name, with their types."""
    hints = {name: hint for section in sampling_sections() for name, hint in get_type_hints(section).items()}
    return {name: hint for name, hint in hints.items() if name not in MANY_ANSWERS}


@dataclass
class Conversation:
    """Messages and settings of a chat. ``exchanges`` are (message, answer) pairs."""

    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    exchanges: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, text: str | None = None) -> list[dict[str, str]]:
        """Messages in OpenAI's form, with the new user message ``text`` at the end if given."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.exchanges:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return messages if text is None else [*messages, {"role": "user", "content": text}]

    def set(self, name: str, text: str) -> None:
        """Set the setting ``name`` to the value that the user typed as ``text``; an empty ``text`` restores the default.

        Raises:
            UserError: there is no such setting, or the value is invalid.
        """
        name = name.lstrip("-").replace("-", "_")
        if (kind := settings().get(name)) is None:
            raise UserError(f"unknown parameter {name!r}; parameters: {', '.join(settings())}")
        others = {key: value for key, value in self.settings.items() if key != name}
        if text:
            try:
                others[name] = msgspec.convert((text,) if name == "stop" else text, kind, strict=False)
            except msgspec.ValidationError:
                raise UserError(f"{name} must be {WORDS[kind]}, not {text!r:.60}") from None
        SamplingParams(**others)  # checks combinations of values, such as min_tokens and max_tokens
        self.settings = others

    def describe_settings(self) -> str:
        """One line of text with all settings."""
        texts = [f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in self.settings.items()]
        return ", ".join(texts) or "all at the model's defaults"

    def save(self, path: str, model: str) -> None:
        """Save the conversation as a JSON file, in the form of a chat request's body.

        Raises:
            UserError: the file cannot be written, or exists already.
        """
        record = {"model": model, "messages": self.messages(), **self.settings}
        try:
            with open(Path(path).expanduser(), "x", encoding="utf-8") as file:
                json.dump(record, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except FileExistsError:
            raise UserError(f"{path} exists; give another name") from None
        except (OSError, RuntimeError, ValueError) as error:  # no home directory, or an invalid file name
            raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
