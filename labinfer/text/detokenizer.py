"""Detokenizer: incremental text of an answer, without partial characters and partial stop strings."""

from __future__ import annotations

from labinfer.text.delimiters import overlap
from labinfer.text.token_decoder import TokenDecoder


class Detokenizer:
    """The text of an answer while its tokens arrive.

    Args:
        decoder: new decoder, to which no token was added.
        stop: strings that end the text.
        include_stop: whether the text keeps the stop string that ended it.
    """

    def __init__(self, decoder: TokenDecoder, stop: tuple[str, ...] = (), include_stop: bool = False):
        self._decoder = decoder
        self._stop, self._include_stop = stop, include_stop
        self._taken = 0
        self._finished = False
        self.text = ""
        self.stopped_by: str | None = None
        """The stop string that ended the text."""

    def add(self, token_id: int, may_stop: bool = True) -> bool:
        """Add a token.

        Args:
            may_stop: whether to search for stop strings.

        Returns:
            Whether a stop string is complete; the text then ends with or before it.
        """
        if piece := self._decoder.add(token_id):
            self._append(piece, may_stop)
        return self.stopped_by is not None

    def finish(self) -> None:
        """End the text; each byte of an incomplete character is shown as U+FFFD."""
        if not self._finished and self.stopped_by is None:
            self._append(self._decoder.finish(), may_stop=False)
        self._finished = True

    def take_new(self) -> str:
        """New final text since the last call; text that may become a stop string is held back."""
        end = len(self.text)
        if self.stopped_by is None and not self._finished:
            end -= max((overlap(self.text, stop) for stop in self._stop), default=0)
        begin, self._taken = self._taken, max(self._taken, end)
        return self.text[begin:end]

    def _append(self, piece: str, may_stop: bool) -> None:
        before = len(self.text)
        self.text += piece
        matches = []
        for stop in self._stop if may_stop else ():  # earlier pieces were searched on arrival
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                matches.append((at, len(stop), stop))
        if matches:
            at, length, self.stopped_by = min(matches)
            self.text = self.text[: at + length * self._include_stop]
