"""Page: one page of a list, as chosen by the query parameters ``limit``, ``order`` and ``after``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from labinfer.base.errors import UserError
from labinfer.server.gateway.endpoint import INTEGER, STRING

Item = TypeVar("Item")
DEFAULT_ITEMS = 20
ORDERS = ("asc", "desc")


def page_query(most: int) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Names and JSON schemas (as in ``Endpoint.query``) of the query parameters of a paginated list with at most
    ``most`` items per page."""
    limit = INTEGER | {"minimum": 1, "maximum": most}
    return ("limit", limit), ("order", STRING | {"enum": list(ORDERS)}), ("after", STRING)


@dataclass(frozen=True)
class Page:
    """Page of a list that a client asks for: up to ``limit`` items that follow the item with the id ``after``. The
    newest item comes first, unless ``order`` is ``asc``."""

    limit: int
    order: str
    after: str | None

    @classmethod
    def read(cls, query: Mapping[str, str], most: int) -> Page:
        """Parse the query parameters of a paginated list.

        Raises:
            UserError: a parameter is out of bounds.
        """
        limit, order = query.get("limit", str(min(most, DEFAULT_ITEMS))), query.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= most):
            raise UserError(f"limit must be from 1 to {most}, not {limit!r:.40}")
        if order not in ORDERS:
            raise UserError(f"order must be asc or desc, not {order!r:.40}")
        return cls(int(limit), order, query.get("after"))

    def cut(self, items: list[Item], id: Callable[[Item], str]) -> dict[str, Any]:
        """Fields of the response with this page of ``items`` (all items of the list, oldest first). ``id`` returns the
        id of an item."""
        items = items if self.order == "asc" else items[::-1]
        begin = next((index + 1 for index, item in enumerate(items) if id(item) == self.after), 0)
        data = items[begin : begin + self.limit]
        return {
            "data": data,
            "first_id": id(data[0]) if data else None,
            "last_id": id(data[-1]) if data else None,
            "has_more": begin + self.limit < len(items),
        }
