"""Options of the terminal chat. Fields of the class become command-line flags, like the options in ``labinfer.base.config``."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.errors import UserError
from labinfer.base.option_fields import option


@dataclass(frozen=True)
class ChatOptions:
    """Server and system prompt of the chat."""

    url: str = option(
        "",
        "chat with the server at this address, such as http://127.0.0.1:8000, instead of loading a model; --model "
        "then selects one of its models",
        metavar="URL",
    )
    api_key: str = option(
        "",
        "API key for the server at --url; set $LABINFER_API_KEY instead to keep it out of the process list",
        metavar="KEY",
        secret=True,
    )
    system: str = option("", "system prompt", metavar="TEXT")

    def __post_init__(self) -> None:
        if self.api_key and not self.url:
            raise UserError("--api-key needs --url; add --url URL, or leave it out")
