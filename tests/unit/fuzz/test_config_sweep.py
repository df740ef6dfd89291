"""Every key of every family's ``config.json`` with values that no honest checkpoint has: read, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import CONFIGS, architecture

from labinfer.base.errors import UserError
from labinfer.models.registry import load_config

DEEP = "[" * 50 + "]" * 50
VALUES = [
    *(
        "null",
        "true",
        "false",
        "0",
        "1",
        "-1",
        "3",
        "2.5",
        "-0.5",
        "1000000000",
        "1" + "0" * 30,
        "-" + "9" * 30,
        "1e308",
    ),
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        '""',
        '"x"',
        '"' + "a" * 5000 + '"',
        '"\\u0000"',
        "[]",
        "[1]",
        "{}",
        '{"a": {}}',
        DEEP,
    ),
]
"""As JSON; Python reads NaN and infinity as well."""
SAMPLE_EVERY = 97
"""One in so many without ``--fuzz-cases``; a prime, so that all keys and all values have their turn over the kinds."""


def changed_configs(kind: str) -> Iterator[str]:
    """The kind's config as JSON; with one value in the place of another, at each key and those of its parts; and without the key."""
    base = json.loads(CONFIGS[kind]().to_json_string()) | {"architectures": [architecture(kind)]}
    yield json.dumps(base)
    places = [(key,) for key in base]
    places += [(key, inner) for key, part in base.items() if isinstance(part, dict) for inner in part]
    for place in places:
        for value in (*VALUES, None):
            yield _with(base, place, value)


def _with(base: dict[str, Any], place: tuple[str, ...], value: str | None) -> str:
    mark, changed = "the value of this test", json.loads(json.dumps(base))
    part = changed
    for key in place[:-1]:
        part = part[key]
    if value is None:
        del part[place[-1]]
        return json.dumps(changed)
    part[place[-1]] = mark
    return json.dumps(changed).replace(json.dumps(mark), value)


@pytest.mark.parametrize("kind", CONFIGS)
def test_changed_config_is_read_or_refused_in_one_line(kind, tmp_path, request):
    every, counts = 1 if request.config.getoption("--fuzz-cases") else SAMPLE_EVERY, {"read": 0, "refused": 0}
    for number, text in enumerate(changed_configs(kind)):
        if number and (number + len(kind)) % every:
            continue
        (tmp_path / "config.json").write_text(text)
        try:
            load_config(tmp_path)
            counts["read"] += 1
        except UserError as error:
            counts["refused"] += 1
            assert "\n" not in str(error), f"config {number}: {error}"
        except BaseException as error:
            raise AssertionError(f"config {number}: {text[:4000]}") from error
    assert counts["read"], "the config as it stands is refused"
    print(f"{kind}: {counts}")
