"""ReplyReader: one answer of a conversation as thoughts, calls and content while it grows, whatever API it is told in."""

from __future__ import annotations

from labinfer.text.reply_parts import Content, Event, ToolCall
from labinfer.text.thought_tokens import ThoughtTokens
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.tools import ToolUse


class ReplyReader:
    """Reads the text of one answer.

    Args:
        tokenizer: None where the checkpoint has none; there is no text then.
        prompt_token_ids: those of the conversation.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: list[int], tool_use: ToolUse):
        self._parser = None
        if tokenizer is not None:
            self._parser = tokenizer.reply_parser(prompt_token_ids, tool_use.offered, tool_use.is_parallel)
        if self._parser is not None:
            self._thought_tokens = ThoughtTokens(tokenizer)
        self.has_functions = tool_use.has_functions
        """Whether calls are told in OpenAI's deprecated form."""
        self.num_calls = 0
        """Calls so far."""

    def read(self, text: str, finish_reason: str | None) -> list[Event]:
        """Take a piece of the answer. Returns the events that it makes certain, all that were open with the last piece.

        Args:
            finish_reason: the engine's reason with the last piece, else None. An answer that ended by its length is cut off: a call
                that is open is told with its arguments so far.
        """
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.feed(text)
        if finish_reason is not None:
            events += self._parser.finish(is_cut=finish_reason == "length")
        self.num_calls += sum(isinstance(event, ToolCall) for event in events)
        return events

    def finish_reason(self, reason: str) -> str:
        """Why the answer has ended, by the engine's ``reason``: one that calls tools has not stopped; one that was cut off
        has not come to its end."""
        if not self.num_calls or reason != "stop":
            return reason
        return "function_call" if self.has_functions else "tool_calls"

    def num_reasoning_tokens(self, token_ids: list[int]) -> int:
        """Tokens of thoughts among those of the text so far, their marks included."""
        return 0 if self._parser is None else self._thought_tokens.count(self._parser, token_ids)
