"""ApiKeys: the callers of a server, and what is derived from their keys."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.requests.openai import api_errors

MIN_KEY_LENGTH = 8
KEY = re.compile(r"[!-~]+")
"""Characters that a header carries unchanged: visible ASCII without spaces."""
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
COMMENT = "#"


@dataclass(frozen=True)
class ApiCaller:
    """Whoever holds one API key."""

    name: str
    """For logs and limits; no part of the key."""
    cache_salt: str = field(default="", repr=False)
    """Callers with different keys have different ones, so that they never share KV blocks."""
    owner: str = field(default="", repr=False)
    """For what is kept on disk: the same wherever the secret of ``ApiKeys`` is, whatever the key is called."""

    def user_for(self, named: str) -> str:
        """Whom the engine takes turns with (``--scheduling-policy fair``): users of different keys are different ones."""
        return f"{self.name}/{named}" if self != ANONYMOUS else named

    def salt_for(self, requested: str | None) -> str:
        """The salt of a request with a ``cache_salt`` of its own: it parts a caller's requests, and joins no others'."""
        return self.cache_salt + (requested or "")


ANONYMOUS = ApiCaller("anonymous")
"""Everyone, where no key is needed."""


class ApiKeys:
    """The keys that open the server; without any, everyone is ``ANONYMOUS``.

    The keys themselves are not kept, only their lengths, and digests under a secret of this process. Salts for the KV cache are such
    digests too: who learns one can neither find the key nor try keys against it.

    Args:
        keys: key and name of each caller.
        secret: one that was kept, where owners are to be the same as before.
    """

    def __init__(self, keys: dict[str, str], secret: bytes = b""):
        self._secret = secret or secrets.token_bytes(32)
        self._callers = [(self._key_digest(key), self._caller(key, name)) for key, name in keys.items()]
        self._digests = {digest for digest, _ in self._callers}
        self._lengths = sorted({len(key) for key in keys}, reverse=True)

    @classmethod
    def load(
        cls, keys: tuple[str, ...] = (), file: str = "", may_be_short: bool = False, secret: bytes = b""
    ) -> ApiKeys:
        """The keys of ``--api-key`` and those of ``--api-key-file``.

        A line of the file is a key, or a name, white space and a key. Empty lines and those that begin with ``#`` are
        passed over. A key without a name is called ``key-N``, the N-th of all.

        Args:
            may_be_short: whether a key may have fewer than ``MIN_KEY_LENGTH`` characters: only this machine can reach the server.

        Raises:
            UserError: the file cannot be read or holds no key; a key is too short, no visible ASCII, or there twice; a
                name is there twice. The text says where, and never holds a key.
        """
        entries = [(f"--api-key no. {number}", "", key) for number, key in enumerate(keys, 1)]
        if file:
            entries += _read_file(file)
        places: dict[str, str] = {}
        names: dict[str, str] = {}
        for number, (place, given_name, key) in enumerate(entries, 1):
            _check_key(place, key, 1 if may_be_short else MIN_KEY_LENGTH)
            if key in places:
                raise UserError(f"{place}: this is the key of {places[key]} again; remove one of them")
            name = given_name or f"key-{number}"
            if name in names.values():
                raise UserError(f"{place}: the name {name} is taken by another key; choose a different one")
            places[key], names[key] = place, name
        return cls(names, secret)

    def __len__(self) -> int:
        return len(self._callers)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self)} keys)"

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._callers)

    def mask(self, text: str, size: int) -> str:
        """The first ``size`` characters of a text, with ``***`` for each key that begins in them: somebody may have put it in the
        wrong place. Keys may have any signs in them, so each place is looked at."""
        shown, place = [], 0
        while place < min(size, len(text)):
            fitting = (length for length in self._lengths if place + length <= len(text))
            length = next((n for n in fitting if self._key_digest(text[place : place + n]) in self._digests), 0)
            shown.append("***" if length else text[place])
            place += length or 1
        return "".join(shown)

    def authenticate(self, authorization_header: str | None, key_header: str | None = None) -> ApiCaller:
        """The caller whose key a request has in its ``Authorization: Bearer KEY`` (RFC 6750), or else in ``x-api-key``.

        The time it takes depends on the length of what was sent, not on what any key is.

        Raises:
            ApiError: a key is needed, and there is none, or none that is valid.
        """
        if not self.required:
            return ANONYMOUS
        scheme, _, key = (authorization_header or "").strip().partition(" ")
        if scheme.lower() != "bearer" and key_header:  # as Anthropic's clients send it
            scheme, key = "bearer", key_header
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise api_errors.unauthorized(
                "this server needs an API key; send it in the header Authorization: Bearer KEY"
            )
        sent = self._key_digest(key)
        match = None
        for digest, caller in self._callers:  # all of them, wherever the right one stands
            if hmac.compare_digest(digest, sent):
                match = caller
        if match is None:
            raise api_errors.unauthorized(
                "Incorrect API key provided; check it, or ask whoever runs this server for one"
            )
        return match

    def caller(self, owner: str) -> ApiCaller:
        """The caller whose files are this owner's.

        Raises:
            UserError: there is none any more.
        """
        callers = [caller for _, caller in self._callers] or [ANONYMOUS]
        for caller in callers:
            if caller.owner == owner:
                return caller
        raise UserError("its API key is no longer one of this server's")

    def _caller(self, key: str, name: str) -> ApiCaller:
        salt, owner = (self._digest(key, purpose).hex() for purpose in (b"labinfer salt", b"labinfer owner"))
        return ApiCaller(name, salt, owner)

    def _key_digest(self, key: str) -> bytes:
        return self._digest(key, b"labinfer key")

    def _digest(self, key: str, purpose: bytes) -> bytes:
        data = key.encode("utf-8", "surrogatepass")  # headers may hold anything
        return hashlib.blake2b(data, key=self._secret, person=purpose, digest_size=32).digest()


def _read_file(file: str) -> list[tuple[str, str, str]]:
    """Place, name or "", and key of each line that has one."""
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read --api-key-file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--api-key-file {file} is not text in UTF-8; write one key a line") from None
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        place, words = f"--api-key-file {file}: line {number}", line.split()
        if not words or words[0].startswith(COMMENT):
            continue
        if len(words) > 2:
            raise UserError(f"{place} has {len(words)} words; write a key, or a name and a key")
        name = words[0] if len(words) == 2 else ""
        if name and not NAME.fullmatch(name):
            raise UserError(
                f"{place}: the name (the first of the two words) may have letters, digits and ._- only, and at most 64"
            )
        entries.append((place, name, words[-1]))
    if not entries:
        raise UserError(f"--api-key-file {file} holds no key; add one, or leave the option out to let everyone in")
    return entries


def _check_key(place: str, key: str, min_length: int) -> None:
    if len(key) < min_length:
        raise UserError(f"{place}: the key has {len(key)} characters; give it at least {min_length}")
    if not KEY.fullmatch(key):
        raise UserError(f"{place}: the key has characters that are no visible ASCII; use letters, digits and -._~+/=")
