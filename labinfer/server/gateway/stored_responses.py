"""StoredResponses: responses that can be looked up and gone on from, in memory, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from labinfer.requests.openai.responses import Response
from labinfer.server.gateway.options import MIB, ServerOptions

OVERHEAD_BYTES = 1024
"""Memory of a stored response beside its texts."""


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """A response and its input, as JSON."""

    id: str
    previous_id: str | None
    response: bytes
    input: bytes
    """The items of its own request; those of the responses before it are found through ``previous_id``."""
    item_ids: tuple[str, ...]
    """Ids of the items of both."""

    @classmethod
    def make(cls, previous_id: str | None, response: Response, input: list[dict[str, Any]]) -> StoredResponse:
        """A response, with the items of its request."""
        output = [item.id for item in response.output]
        return cls(
            id=response.id,
            previous_id=previous_id,
            response=msgspec.json.encode(response),
            input=msgspec.json.encode(input),
            item_ids=(*(item["id"] for item in input), *output),
        )

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return len(self.response) + len(self.input) + OVERHEAD_BYTES

    def input_items(self) -> list[dict[str, Any]]:
        """The items of its own request."""
        return msgspec.json.decode(self.input)

    def items(self) -> list[dict[str, Any]]:
        """The same, and those of the answer."""
        return self.input_items() + msgspec.json.decode(self.response)["output"]


@dataclass(eq=False)
class _Shelf:
    """The responses of one owner, the one that was used the longest ago first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    places: dict[str, str] = field(default_factory=dict)
    """Id of the response that has an item, by the item's id."""
    num_bytes: int = 0


class StoredResponses:
    """Responses by their owners and ids. Where they are too many or too large, the owner who has the most bytes loses the one
    that was used the longest ago.
    """

    def __init__(self, options: ServerOptions):
        self._most, self._most_bytes = options.max_stored_responses, options.max_stored_size * MIB
        self._shelves: dict[str, _Shelf] = {}

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep a response, if there is room for it at all."""
        self.delete(owner, stored.id)
        if stored.num_bytes > self._most_bytes or not self._most:
            return
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.responses[stored.id] = stored
        shelf.places |= dict.fromkeys(stored.item_ids, stored.id)
        shelf.num_bytes += stored.num_bytes
        while self._is_too_full():
            largest = max(self._shelves, key=lambda name: self._shelves[name].num_bytes)
            self.delete(largest, next(iter(self._shelves[largest].responses)))

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """The owner's response of this id, which counts as used; None where there is none."""
        shelf = self._shelves.get(owner)
        if shelf is None or id not in shelf.responses:
            return None
        shelf.responses.move_to_end(id)
        return shelf.responses[id]

    def get_by_item(self, owner: str, item_id: str) -> StoredResponse | None:
        """The owner's last response that has this item."""
        shelf = self._shelves.get(owner)
        return None if shelf is None else self.get(owner, shelf.places.get(item_id, ""))

    def chain(self, owner: str, id: str | None) -> list[StoredResponse]:
        """A response and all before it, the first one first; those that are still there, of which the first may have one
        before it that is not. One that has taken the id of an earlier one, and so would follow itself, is not before it.
        """
        chain: dict[str, StoredResponse] = {}
        while id is not None and id not in chain and (stored := self.get(owner, id)) is not None:
            chain[id] = stored
            id = stored.previous_id
        return list(chain.values())[::-1]

    def delete(self, owner: str, id: str) -> bool:
        """Forget a response. Returns whether there was one."""
        shelf = self._shelves.get(owner)
        stored = None if shelf is None else shelf.responses.pop(id, None)
        if stored is None:
            return False
        shelf.num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            if shelf.places.get(item_id) == id:
                del shelf.places[item_id]
        if not shelf.responses:
            del self._shelves[owner]
        return True

    def _is_too_full(self) -> bool:
        shelves = self._shelves.values()
        return (
            sum(len(shelf.responses) for shelf in shelves) > self._most
            or sum(shelf.num_bytes for shelf in shelves) > self._most_bytes
        )
