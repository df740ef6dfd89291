"""Detokenizer: the text of an answer while its tokens arrive. It holds back incomplete characters, and text that may be the
beginning of a stop string."""

from __future__ import annotations

from labinfer.text.delimiters import overlap
from labinfer.text.token_decoder import TokenDecoder


class Detokenizer:
    """Text of an answer, built token by token.

    Args:
        decoder: a decoder to which no token has been added yet.
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
        """Stop string that ended the text; None while none has."""

    def add(self, token_id: int, may_stop: bool = True) -> bool:
        """Add the next token of the answer.

        Args:
            may_stop: whether stop strings may end the text now.

        Returns:
            Whether a stop string has ended the text. The text then ends before the stop string, or after it with ``include_stop``.
        """
        if piece := self._decoder.add(token_id):
            self._append(piece, may_stop)
        return self.stopped_by is not None

    def finish(self) -> None:
        """End the text. Each byte of an incomplete character becomes U+FFFD."""
        if not self._finished and self.stopped_by is None:
            self._append(self._decoder.finish(), may_stop=False)
        self._finished = True

    def take_new(self) -> str:
        """Return text that became final after the last call of this method. Text that may be the beginning of a stop string is held
        back."""
        end = len(self.text)
        if self.stopped_by is None and not self._finished:
            end -= max((overlap(self.text, stop) for stop in self._stop), default=0)
        begin, self._taken = self._taken, max(self._taken, end)
        return self.text[begin:end]

    def _append(self, piece: str, may_stop: bool) -> None:
        before = len(self.text)
        self.text += piece
        matches = []
        for stop in self._stop if may_stop else ():  # text of earlier tokens was searched when they arrived
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                matches.append((at, len(stop), stop))
        if matches:
            at, length, self.stopped_by = min(matches)
            self.text = self.text[: at + length * self._include_stop]
