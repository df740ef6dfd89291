"""Responses that are kept: for their owner only, and within bounds."""

from __future__ import annotations

from labinfer.server.gateway.options import MIB, ServerOptions
from labinfer.server.gateway.stored_responses import StoredResponse, StoredResponses


def stored(id: str, num_bytes: int = 1, previous_id: str | None = None, item_ids: tuple[str, ...] = ()):
    return StoredResponse(
        id=id, previous_id=previous_id, response=b" " * num_bytes, input=b"[]", item_ids=item_ids or (f"item-{id}",)
    )


def store(**options) -> StoredResponses:
    return StoredResponses(ServerOptions(**options))


def test_responses_are_their_owners_alone():
    responses = store()
    responses.put("a", stored("1"))
    assert responses.get("a", "1") and responses.get_by_item("a", "item-1")
    assert not responses.get("b", "1") and not responses.get_by_item("b", "item-1")
    assert not responses.delete("b", "1") and responses.delete("a", "1")
    assert not responses.get("a", "1") and not responses.get_by_item("a", "item-1")


def test_the_one_unused_for_longest_goes_first():
    responses = store(max_stored_responses=3)
    for id in "123":
        responses.put("a", stored(id))
    assert responses.get("a", "1")
    responses.put("a", stored("4"))
    assert [bool(responses.get("a", id)) for id in "1234"] == [True, False, True, True]


def test_whoever_has_the_most_bytes_makes_room():
    responses = store(max_stored_size=1)
    responses.put("small", stored("1"))
    for number in range(6):
        responses.put("large", stored(f"l{number}", MIB // 4))
    assert responses.get("small", "1")
    assert [bool(responses.get("large", f"l{number}")) for number in range(6)] == [False] * 3 + [True] * 3
    responses.put("large", stored("huge", 2 * MIB))
    assert not responses.get("large", "huge")


def test_none_is_kept_where_none_is_to_be():
    responses = store(max_stored_responses=0)
    responses.put("a", stored("1"))
    assert not responses.get("a", "1")


def test_chain_ends_where_one_is_gone():
    responses = store()
    for id, previous_id in (("1", None), ("2", "1"), ("3", "2")):
        responses.put("a", stored(id, previous_id=previous_id))
    assert [item.id for item in responses.chain("a", "3")] == ["1", "2", "3"]
    responses.delete("a", "1")
    assert [item.id for item in responses.chain("a", "3")] == ["2", "3"]
    assert responses.chain("a", None) == []


def test_item_of_two_responses_is_found_in_the_last():
    responses = store()
    responses.put("a", stored("1", item_ids=("x",)))
    responses.put("a", stored("2", item_ids=("x",)))
    responses.delete("a", "1")
    assert responses.get_by_item("a", "x").id == "2"


def test_chain_ends_where_a_response_has_the_id_of_one_before_it():
    responses = store()
    for id, previous_id in (("1", None), ("2", "1"), ("1", "2")):
        responses.put("a", stored(id, previous_id=previous_id))
    chain = responses.chain("a", "1")
    assert ([item.id for item in chain], chain[0].previous_id) == (["2", "1"], "1")
