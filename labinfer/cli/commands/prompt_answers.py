"""PromptAnswers: writes the answers to --prompt in the order of the prompts, and streams the first unfinished one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labinfer.requests.outputs import Delta, RequestOutput


class PromptAnswers:
    """Writes answers in the order of their prompts, although they are generated in parallel: an answer is held back until all
    earlier answers are written.

    Args:
        titles: line that is written before each answer; empty for none.
        write: function that writes a text.
    """

    def __init__(self, titles: Sequence[str], write: Callable[[str], None]):
        self._write = write
        self._pending = [f"--- {title}\n" if title else "" for title in titles]
        self._ended: set[int] = set()
        self._turn = 0
        self._is_open = False  # whether the last written line has no line feed yet

    def grow(self, delta: Delta) -> None:
        """Append ``delta`` to the answer of prompt ``delta.key``, and write all text that need not be held back any more."""
        self._pending[delta.key] += delta.text or ""
        self._show()

    def end(self, output: RequestOutput, has_grown: bool) -> None:
        """Mark the answers to prompt ``output.key`` as complete, and write all text that need not be held back any more.

        Args:
            has_grown: whether the text of the answers has already arrived as deltas.
        """
        texts = [] if has_grown else [completion.text or "" for completion in output.completions]
        self._pending[output.key] += "\n".join(texts) + "\n"
        self._ended.add(output.key)
        self._show()

    def close(self) -> None:
        """End the line of an answer that was interrupted."""
        if self._is_open:
            self._write("\n")
            self._is_open = False

    def _show(self) -> None:
        while self._turn < len(self._pending):
            text, self._pending[self._turn] = self._pending[self._turn], ""
            if text:
                self._write(text)
                self._is_open = not text.endswith("\n")
            if self._turn not in self._ended:
                return
            self._turn += 1
