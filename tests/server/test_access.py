"""API keys: who is let in, what is refused when they are read, and that nothing gives them away."""

from __future__ import annotations

import hmac
import logging
import pickle

import pytest

from labinfer.base.errors import UserError
from labinfer.server.gateway.access import ANONYMOUS, ApiKeys
from tests.refusals import refused

FIRST, SECOND = "sk-first-0123456789", "sk-second-0123456789"


@pytest.fixture
def key_file(tmp_path):
    def write(content: str | bytes) -> str:
        path = tmp_path / "keys"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_without_keys_everyone_is_the_same_caller():
    keys = ApiKeys.load()
    assert not keys.required
    for header in (None, "", "Bearer EMPTY", "Basic dXNlcjpwYXNz", "\x00\udcff"):
        assert keys.authenticate(header) is ANONYMOUS
    assert ANONYMOUS.cache_salt == ""


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "Bearer   ", "  Bearer "])
def test_key_opens_whatever_the_scheme_is_spelled_like(scheme):
    keys = ApiKeys.load((FIRST, SECOND))
    assert keys.authenticate(scheme + FIRST).name == "key-1"
    assert keys.authenticate(scheme + SECOND + " ").name == "key-2"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        " ",
        "Bearer",
        "Bearer ",
        FIRST,
        f"Basic {FIRST}",
        f"Bearer{FIRST}",
        f"Bearer {FIRST[:-1]}",
        f"Bearer {FIRST}x",
        f"Bearer {FIRST.upper()}",
        f"Bearer {FIRST} {SECOND}",
        f"Bearer {FIRST},{SECOND}",
        f"Bearer {FIRST}\x00",
        "Bearer key-1",
        "Bearer é",
        "Bearer \udcff",
        "Bearer " + "x" * 100_000,
    ],
)
def test_with_keys_everything_else_is_denied(header):
    keys = ApiKeys.load((FIRST, SECOND))
    assert keys.required
    with refused(401) as caught:
        keys.authenticate(header)
    assert FIRST not in str(caught.value) and SECOND not in str(caught.value)


def test_wrong_key_is_refused_in_the_words_by_which_litellm_knows_it():
    with refused(401, match="Incorrect API key provided"):
        ApiKeys.load((FIRST,)).authenticate("Bearer wrong")


def test_every_key_is_compared_wherever_the_right_one_stands(monkeypatch):
    given = tuple(f"sk-number-{number}-0123456789" for number in range(7))
    keys = ApiKeys.load(given)
    compared = []
    original = hmac.compare_digest

    def count(a, b):
        compared.append((a, b))
        return original(a, b)

    monkeypatch.setattr(hmac, "compare_digest", count)
    for key in (given[0], given[3], given[6]):
        compared.clear()
        keys.authenticate(f"Bearer {key}")
        assert len(compared) == 7
        assert {len(side) for pair in compared for side in pair} == {32}  # whatever was sent: equally long digests
    compared.clear()
    with refused(401):
        keys.authenticate("Bearer x")
    assert len(compared) == 7


def test_callers_with_different_keys_have_different_salts_that_do_not_show_the_key():
    keys = ApiKeys.load((FIRST, SECOND))
    first, second = (keys.authenticate(f"Bearer {key}") for key in (FIRST, SECOND))
    assert len({first.cache_salt, second.cache_salt, ANONYMOUS.cache_salt}) == 3
    assert first == keys.authenticate(f"Bearer {FIRST}")  # the same one always
    assert FIRST not in first.cache_salt
    assert (
        first.cache_salt != ApiKeys.load((FIRST,)).authenticate(f"Bearer {FIRST}").cache_salt
    )  # nor can it be computed


def test_requests_own_salt_parts_but_never_joins():
    keys = ApiKeys.load((FIRST, SECOND))
    first, second = (keys.authenticate(f"Bearer {key}") for key in (FIRST, SECOND))
    salts = [caller.salt_for(own) for caller in (first, second) for own in (None, "a", "b")]
    assert len(set(salts)) == 6
    assert first.salt_for(None) == first.salt_for("") == first.cache_salt
    assert first.salt_for(second.cache_salt) != second.cache_salt
    assert ANONYMOUS.salt_for("a") == "a"


def test_nothing_that_can_be_printed_or_kept_holds_a_key(caplog):
    caplog.set_level(logging.DEBUG)
    keys = ApiKeys.load((FIRST,))
    caller = keys.authenticate(f"Bearer {FIRST}")
    for shown in (repr(keys), str(keys), repr(caller), str(vars(keys)), caplog.text):
        assert FIRST not in shown
    assert caller.cache_salt not in repr(caller)
    assert FIRST.encode() not in pickle.dumps(keys)


def test_file_has_keys_with_and_without_names(key_file):
    path = key_file(f"\ufeff# the lab\r\n\n  {FIRST}\r\nweb-app\t {SECOND}  \n   # the end\n\nsk-#-and-%3D=")
    keys = ApiKeys.load(("sk-from-the-flags",), path)
    assert len(keys) == 4
    for key, name in (
        ("sk-from-the-flags", "key-1"),
        (FIRST, "key-2"),
        (SECOND, "web-app"),
        ("sk-#-and-%3D=", "key-4"),
    ):
        assert keys.authenticate(f"Bearer {key}").name == name


@pytest.mark.parametrize(
    ("content", "place", "what"),
    [
        ("", "keys", "contains no key"),
        ("\n# only comments\n\n", "keys", "contains no key"),
        (b"\xff\xfe\x00", "keys", "UTF-8"),
        ("# keys\nsecret7\n", "line 2", "7 characters"),
        (f"{FIRST}\nname secret7\n", "line 2", "7 characters"),
        (f"a b {FIRST}\n", "line 1", "3 words"),
        (f"{FIRST} # mine\n", "line 1", "3 words"),
        (f"lab: {FIRST}\n", "line 1", "name"),
        (f"{'n' * 65} {FIRST}\n", "line 1", "name"),
        ("schlüssel-secret\n", "line 1", "visible ASCII"),
        (f"a {FIRST}\n\nb {FIRST}\n", "line 3", "line 1"),
        (f"a {FIRST}\na {SECOND}\n", "line 2", "name a"),
        (f"{FIRST}\nkey-1 {SECOND}\n", "line 2", "name key-1"),
    ],
)
def test_file_with_a_mistake_is_refused_where_it_stands_without_showing_a_key(key_file, content, place, what):
    with pytest.raises(UserError) as caught:
        ApiKeys.load(file=key_file(content))
    text = str(caught.value)
    assert "--api-key-file" in text and place in text and what in text and "\n" not in text
    assert FIRST not in text and SECOND not in text and "secret" not in text


def test_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="cannot read --api-key-file"):
            ApiKeys.load(file=str(path))


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (("short",), "no. 1"),
        ((FIRST, ""), "no. 2"),
        ((FIRST, "with a space"), "no. 2"),
        ((FIRST, SECOND, FIRST), "no. 3: duplicate of the key of --api-key no. 1"),
    ],
)
def test_keys_of_the_command_line_are_checked_too(keys, what):
    with pytest.raises(UserError) as caught:
        ApiKeys.load(keys)
    assert f"--api-key {what}" in str(caught.value)
    assert FIRST not in str(caught.value)


def test_key_is_there_once_in_file_and_flags_together(key_file):
    with pytest.raises(UserError, match="line 1: duplicate of the key of --api-key no. 1"):
        ApiKeys.load((FIRST,), key_file(FIRST))


@pytest.mark.parametrize("key", [FIRST, "aB3/xY+z0=/9Q==", "with?every&sign=/"])
def test_key_in_a_text_is_masked_wherever_it_stands(key):
    keys = ApiKeys.load((SECOND, key))
    for before, after in (("/v1/", ""), ("/", "/v1/models"), ("/v1/modles?key=", "&a=b"), ("x", "x"), ("", "")):
        assert keys.mask(before + key + after, 256) == f"{before}***{after}"
    assert keys.mask(f"/{key}{SECOND}{key[:-1]}", 256) == f"/******{key[:-1]}"
    assert keys.mask("é/\udcff/plain", 256) == "é/\udcff/plain"
    assert ApiKeys.load().mask(key, 256) == key


def test_key_across_the_end_of_what_is_shown_is_masked():
    keys = ApiKeys.load((FIRST, SECOND))
    for begin in range(90, 100):
        assert keys.mask("/" * begin + FIRST + "/" * 70000, 100) == "/" * begin + "***" + "/" * max(
            0, 100 - begin - len(FIRST)
        )
    assert keys.mask("/" * 100 + FIRST, 100) == "/" * 100
