"""Seeded mutations of bytes, and what counts as a failure of the code that reads them."""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence

from labinfer.errors import UserError

MAX_SECONDS = 5.0
"""Longest time of a case."""
MAX_GROWTH = 256 << 20
"""Most bytes by which this process may grow over all cases."""
PIECES = [
    b"",
    b"\0",
    b"\xff" * 8,
    b"\xed\xa0\x80",
    b"[" * 5000,
    b'{"a":' * 200,
    b"1e999",
    b"-0",
    b"9" * 400,
    b"\r\n",
    b"null",
]
PIECES += [bytes([0xDD, 0xFF, 0xFF, 0xFF, 0xFF]), bytes([0x91]) * 3000, bytes([0xDB]) + b"\x7f\xff\xff\xff", b"\\ud800"]


def mutate(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, with some of its bytes changed, dropped, doubled or replaced by nasty ones."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 1, 2, 4, 16, 256)))
        way = draw.randrange(6)
        if way == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif way == 1:
            data[at:at] = draw.choice(PIECES)
        elif way == 2:
            del data[at:end]
        elif way == 3:
            data[at:end] = draw.randbytes(end - at)
        elif way == 4:
            data[at:at] = data[at:end] * draw.choice((1, 2, 50))
        else:
            other = draw.choice(seeds)
            data[at:] = other[draw.randrange(len(other) + 1) :]
    return bytes(data[: 1 << 20])


def fuzz(
    read: Callable[[bytes], object],
    seeds: Sequence[bytes],
    *,
    cases: int,
    seed: int,
    refusals: tuple[type[BaseException], ...],
) -> Counter[str]:
    """Give mutated bytes to a reader; how many were taken and refused, by the error's name.

    Any other error is a failure, as is a case that takes long, or memory that is kept.
    """
    draw, counts, before = random.Random(seed), Counter(), _peak_bytes()
    for number in range(cases):
        data, begin = mutate(draw, seeds), time.monotonic()
        try:
            read(data)
            counts["taken"] += 1
        except refusals as error:
            counts[type(error).__name__] += 1
            assert "\n" not in str(error) or not isinstance(error, UserError), f"case {number} of seed {seed}: {error}"
        except BaseException as error:
            raise AssertionError(f"case {number} of seed {seed}: {data[:200]!r}") from error
        assert time.monotonic() - begin < MAX_SECONDS, f"case {number} of seed {seed} took too long: {data[:200]!r}"
    growth = _peak_bytes() - before
    assert growth < MAX_GROWTH, f"{growth >> 20} MiB more"
    print(f"{cases} cases, seed {seed}: {dict(counts)}, {growth >> 20} MiB more at most")
    return counts


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
