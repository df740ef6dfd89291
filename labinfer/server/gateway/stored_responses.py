"""StoredResponses: responses of ``/v1/responses``, kept in bounded memory, so that clients can retrieve and continue them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from labinfer.requests.openai.responses import Response
from labinfer.server.gateway.options import MIB, ServerOptions

OVERHEAD_BYTES = 1024
"""Estimated memory of a stored response, in bytes, without its JSON."""


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """A response, and the input of the request that it answers, as JSON."""

    id: str
    previous_id: str | None
    response: bytes
    input: bytes
    """Input items of the request. Earlier items of the conversation are in the response ``previous_id``."""
    item_ids: tuple[str, ...]
    """Ids of the input and output items."""

    @classmethod
    def make(cls, previous_id: str | None, response: Response, input: list[dict[str, Any]]) -> StoredResponse:
        """Encode a response and the input items of its request."""
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
        """Estimated memory use in bytes."""
        return len(self.response) + len(self.input) + OVERHEAD_BYTES

    def input_items(self) -> list[dict[str, Any]]:
        """Input items of the request that this response answers."""
        return msgspec.json.decode(self.input)

    def items(self) -> list[dict[str, Any]]:
        """Input items of the request, and output items of the response."""
        return self.input_items() + msgspec.json.decode(self.response)["output"]


@dataclass(eq=False)
class _LruStore:
    """Stored responses of one owner by id, the least recently used first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    places: dict[str, str] = field(default_factory=dict)
    """Maps the id of an item to the id of the response that contains it."""
    num_bytes: int = 0


class StoredResponses:
    """Stored responses, by owner and id. If they exceed the memory limit, the owner with the most bytes loses its least
    recently used response."""

    def __init__(self, options: ServerOptions):
        self._most, self._most_bytes = options.max_stored_responses, options.max_stored_size * MIB
        self._stores: dict[str, _LruStore] = {}

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Store a response, unless it is larger than the memory limit."""
        self.delete(owner, stored.id)
        if stored.num_bytes > self._most_bytes or not self._most:
            return
        store = self._stores.setdefault(owner, _LruStore())
        store.responses[stored.id] = stored
        store.places |= dict.fromkeys(stored.item_ids, stored.id)
        store.num_bytes += stored.num_bytes
        while self._is_too_full():
            largest = max(self._stores, key=lambda name: self._stores[name].num_bytes)
            self.delete(largest, next(iter(self._stores[largest].responses)))

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """Return the response ``id`` of ``owner`` and mark it as used; None if there is no such response."""
        store = self._stores.get(owner)
        if store is None or id not in store.responses:
            return None
        store.responses.move_to_end(id)
        return store.responses[id]

    def get_by_item(self, owner: str, item_id: str) -> StoredResponse | None:
        """Return the latest response of ``owner`` that contains the item ``item_id``; None if there is no such response."""
        store = self._stores.get(owner)
        return None if store is None else self.get(owner, store.places.get(item_id, ""))

    def chain(self, owner: str, id: str | None) -> list[StoredResponse]:
        """The response ``id`` and the responses that it continues, oldest first, as far as they are still stored. As a client may
        reuse ids, the chain ends before an id that occurs again."""
        chain: dict[str, StoredResponse] = {}
        while id is not None and id not in chain and (stored := self.get(owner, id)) is not None:
            chain[id] = stored
            id = stored.previous_id
        return list(chain.values())[::-1]

    def delete(self, owner: str, id: str) -> bool:
        """Delete a response. Returns whether the response existed."""
        store = self._stores.get(owner)
        stored = None if store is None else store.responses.pop(id, None)
        if stored is None:
            return False
        store.num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            if store.places.get(item_id) == id:
                del store.places[item_id]
        if not store.responses:
            del self._stores[owner]
        return True

    def _is_too_full(self) -> bool:
        shelves = self._stores.values()
        return (
            sum(len(store.responses) for store in shelves) > self._most
            or sum(store.num_bytes for store in shelves) > self._most_bytes
        )
