"""ReplyReader: splits a streamed answer into reasoning, tool calls and content; used by all APIs."""

from __future__ import annotations

from labinfer.text.reasoning_tokens import ReasoningTokens
from labinfer.text.reply_parts import Content, Event, ToolCall
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.tools import ToolUse


class ReplyReader:
    """Parses the text of one answer as it streams in.

    Args:
        tokenizer: the checkpoint's tokenizer; None if it has none, in which case answers have no text.
        prompt_token_ids: token ids of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: list[int], tool_use: ToolUse):
        self._parser = None
        if tokenizer is not None:
            self._parser = tokenizer.reply_parser(prompt_token_ids, tool_use.offered, tool_use.is_parallel)
        if self._parser is not None:
            self._reasoning_tokens = ReasoningTokens(tokenizer)
        self.has_functions = tool_use.has_functions
        """Whether tool calls are reported in OpenAI's deprecated form (``function_call``)."""
        self.num_calls = 0
        """Number of tool calls in the answer so far."""

    def read(self, text: str, finish_reason: str | None) -> list[Event]:
        """Parse the next piece of the answer. Returns the events that the piece completes. The last piece completes all remaining
        events.

        Args:
            finish_reason: the engine's finish reason if this is the last piece, otherwise None. With ``length`` the
                answer is truncated: an incomplete tool call is returned with the arguments that have arrived.
        """
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.feed(text)
        if finish_reason is not None:
            events += self._parser.finish(is_cut=finish_reason == "length")
        self.num_calls += sum(isinstance(event, ToolCall) for event in events)
        return events

    def finish_reason(self, reason: str) -> str:
        """Convert the engine's finish ``reason`` to the API's: ``stop`` becomes ``tool_calls`` (or ``function_call``)
        if the answer has tool calls."""
        if not self.num_calls or reason != "stop":
            return reason
        return "function_call" if self.has_functions else "tool_calls"

    def num_reasoning_tokens(self, token_ids: list[int]) -> int:
        """Number of reasoning tokens, including delimiters, in ``token_ids``, which are all tokens of the answer so far."""
        return 0 if self._parser is None else self._reasoning_tokens.count(self._parser, token_ids)
