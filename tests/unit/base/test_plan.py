"""Results on the wire: what they come back as, and that the room announced for them is enough and not much more."""

from __future__ import annotations

import msgspec
import pytest

from labinfer.base.plan import BatchResult, EntryResult, TokenLogprobs

LARGEST_ID = 2**32 - 1


def measured(top: int) -> TokenLogprobs:
    likeliest = {LARGEST_ID - index: -1 / (3 + index) for index in range(top)}
    return TokenLogprobs(LARGEST_ID, -1 / 3, likeliest, LARGEST_ID)


def entry(num_samples: int, top: int | None, num_prompt: int, prompt_top: int | None, num_numbers: int) -> EntryResult:
    """As large as it can be."""
    return EntryResult(
        token_ids=(LARGEST_ID,) * num_samples,
        logprobs=(measured(top),) * num_samples if top is not None else (),
        prompt_logprobs=(measured(prompt_top),) * num_prompt if prompt_top is not None else (),
        vector=(1 / 3,) * num_numbers,
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("num_samples", [0, 1, 15, 16])
@pytest.mark.parametrize("top", [None, 0, 5, 20])
@pytest.mark.parametrize(("num_prompt", "prompt_top"), [(0, None), (3, 0), (70_000, 2)])
@pytest.mark.parametrize("num_numbers", [0, 70_000])
def test_largest_result_takes_the_bytes_announced(num_samples, top, num_prompt, prompt_top, num_numbers):
    result = BatchResult(2**62, [entry(num_samples, top, num_prompt, prompt_top, num_numbers)] * 3)
    size = EntryResult.max_bytes(
        num_samples=num_samples, top=top, num_prompt=num_prompt, prompt_top=prompt_top, num_numbers=num_numbers
    )
    room = BatchResult.max_bytes(3) + 3 * size
    assert room - 40 <= len(result.encode()) <= room
    assert BatchResult.decode(result.encode()) == result


def test_room_for_a_plain_decode_is_small():
    assert EntryResult.max_bytes(num_samples=1) == 11


@pytest.mark.parametrize("data", [b"", b"\xc0", msgspec.msgpack.encode([1, [[["x"], [], [], []]]])])
def test_bytes_that_are_no_result_are_refused(data):
    with pytest.raises(msgspec.DecodeError):
        BatchResult.decode(data)
