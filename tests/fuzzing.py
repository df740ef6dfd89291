"""Seeded mutations of bytes, and what counts as a failure of the code that reads them."""

from __future__ import annotations

import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

from labinfer.base.errors import UserError

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
VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    1e308,
    -0.5,
    "",
    "x",
    "a" * 5000,
    "\0",
    "\ud800",
    "(a+)+",
    [],
    [1],
    {},
    {"a": {}},
]
VALUES.append([[[[[[[[]]]]]]]] * 50)
"""Values that take the place of others in JSON."""


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


def mutate_json(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, which are JSON objects, with some values left out, or replaced by others; one in four as ``mutate`` does it."""
    if not draw.randrange(4):
        return mutate(draw, seeds)
    whole = json.loads(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = list(_places(whole))
        if not places:
            break
        part, key = draw.choice(places)
        way = draw.randrange(4)
        if way == 0:
            del part[key]
        elif way == 1:
            other, name = draw.choice(places)
            part[key] = deepcopy(other[name])
        else:
            part[key] = deepcopy(draw.choice(VALUES))
    return json.dumps(whole).encode()


def _places(part: Any) -> Iterator[tuple[Any, Any]]:
    """Every object or list inside a JSON value, with each of its keys or indices."""
    if isinstance(part, (dict, list)):
        for key in part if isinstance(part, dict) else range(len(part)):
            yield part, key
            yield from _places(part[key])


def fuzz(
    read: Callable[[bytes], object],
    seeds: Sequence[bytes],
    *,
    cases: int,
    seed: int,
    refusals: tuple[type[BaseException], ...],
    change: Callable[[random.Random, Sequence[bytes]], bytes] = mutate,
) -> Counter[str]:
    """Give mutated bytes to a reader; how many were taken and refused, by the error's name.

    Any other error is a failure, as is a case that takes long, or memory that is kept.
    """
    draw, counts, before = random.Random(seed), Counter(), _peak_bytes()
    for number in range(cases):
        data, begin = change(draw, seeds), time.monotonic()
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
