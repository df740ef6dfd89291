"""ApiKeys: API keys, and the names, salts and owner ids derived from them."""

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
"""A valid API key: visible ASCII characters without spaces, which an HTTP header carries unchanged."""
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
COMMENT = "#"


@dataclass(frozen=True)
class ApiCaller:
    """Holder of one API key, or the anonymous caller of a server without keys."""

    name: str
    """Name of the caller in logs and limits; contains no part of the key."""
    cache_salt: str = field(default="", repr=False)
    """Prefix-cache salt. Each key has a salt of its own, so that callers never share KV blocks."""
    owner: str = field(default="", repr=False)
    """Owner id of the files that this caller stores. It depends on the key and the secret of ``ApiKeys``, but not on ``name``."""

    def user_for(self, named: str) -> str:
        """User id of a request whose body names the user ``named``, for the scheduler (``--scheduling-policy fair``).
        It begins with the key's name, so that two keys never share a user."""
        return f"{self.name}/{named}" if self != ANONYMOUS else named

    def salt_for(self, requested: str | None) -> str:
        """Prefix-cache salt of a request: the caller's salt, extended by the request's ``cache_salt``. A request never shares KV
        blocks with requests of another caller."""
        return self.cache_salt + (requested or "")


ANONYMOUS = ApiCaller("anonymous")
"""Caller of every request if no key is required."""


class ApiKeys:
    """API keys of the server; without keys, every caller is ``ANONYMOUS``.

    Of each API key only the length and a digest are kept. Cache salts and owner ids are digests of the API key, too. All digests also
    depend on a secret, so that nobody can find or test an API key by a leaked digest.

    Args:
        keys: API key and name of each caller.
        secret: secret that digests of API keys depend on; a stored one keeps owner ids stable across restarts. Empty for a random secret.
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
        """Load the keys of ``--api-key`` and ``--api-key-file``.

        A line of the file is a key, or a name, white space and a key. Empty lines and lines that begin with ``#`` are skipped.
        A key without a name is called ``key-N``, where N counts all keys.

        Args:
            may_be_short: whether keys may have fewer than ``MIN_KEY_LENGTH`` characters; only for a server that no
                other machine can reach.

        Raises:
            UserError: the file cannot be read or holds no key; a key is too short, not visible ASCII, or a duplicate; a
                name is a duplicate. The message names the file and line, and never contains a key.
        """
        entries = [(f"--api-key no. {number}", "", key) for number, key in enumerate(keys, 1)]
        if file:
            entries += _read_file(file)
        places: dict[str, str] = {}
        names: dict[str, str] = {}
        for number, (place, given_name, key) in enumerate(entries, 1):
            _check_key(place, key, 1 if may_be_short else MIN_KEY_LENGTH)
            if key in places:
                raise UserError(f"{place}: duplicate of the key of {places[key]}; remove one of them")
            name = given_name or f"key-{number}"
            if name in names.values():
                raise UserError(f"{place}: the name {name} is already used by another key; choose a different one")
            places[key], names[key] = place, name
        return cls(names, secret)

    def __len__(self) -> int:
        return len(self._callers)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self)} keys)"

    @property
    def required(self) -> bool:
        """Whether every request must send an API key."""
        return bool(self._callers)

    def mask(self, text: str, size: int) -> str:
        """First ``size`` characters of ``text``, for a log or an error, with ``***`` in place of each API key that begins there: a
        user may have pasted a key into the wrong field. As a key may contain any visible character, it is searched at every
        position."""
        shown, place = [], 0
        while place < min(size, len(text)):
            fitting = (length for length in self._lengths if place + length <= len(text))
            length = next((n for n in fitting if self._key_digest(text[place : place + n]) in self._digests), 0)
            shown.append("***" if length else text[place])
            place += length or 1
        return "".join(shown)

    def authenticate(self, authorization_header: str | None, key_header: str | None = None) -> ApiCaller:
        """Return the caller whose API key is in the header ``Authorization: Bearer KEY`` (RFC 6750), or else in
        ``x-api-key``.

        The comparison takes constant time: its duration depends only on the length of the header.

        Raises:
            ApiError: a key is required, and the request has none or an invalid one.
        """
        if not self.required:
            return ANONYMOUS
        scheme, _, key = (authorization_header or "").strip().partition(" ")
        if scheme.lower() != "bearer" and key_header:  # Anthropic's clients send ``x-api-key``
            scheme, key = "bearer", key_header
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise api_errors.unauthorized(
                "this server needs an API key; send it as the header Authorization: Bearer KEY"
            )
        sent = self._key_digest(key)
        match = None
        for digest, caller in self._callers:  # no early exit, for constant time
            if hmac.compare_digest(digest, sent):
                match = caller
        if match is None:
            raise api_errors.unauthorized(
                "Incorrect API key provided; check it, or ask the operator of this server for one"
            )
        return match

    def caller(self, owner: str) -> ApiCaller:
        """Return the caller with the owner id ``owner``.

        Raises:
            UserError: no key of this server has that owner id.
        """
        callers = [caller for _, caller in self._callers] or [ANONYMOUS]
        for caller in callers:
            if caller.owner == owner:
                return caller
        raise UserError("its API key is no longer valid on this server")

    def _caller(self, key: str, name: str) -> ApiCaller:
        salt, owner = (self._digest(key, purpose).hex() for purpose in (b"labinfer salt", b"labinfer owner"))
        return ApiCaller(name, salt, owner)

    def _key_digest(self, key: str) -> bytes:
        return self._digest(key, b"labinfer key")

    def _digest(self, key: str, purpose: bytes) -> bytes:
        data = key.encode("utf-8", "surrogatepass")  # a header may have any characters
        return hashlib.blake2b(data, key=self._secret, person=purpose, digest_size=32).digest()


def _read_file(file: str) -> list[tuple[str, str, str]]:
    """Parse a key file. Returns (location for errors, name or "", key) of each line with a key."""
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read --api-key-file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--api-key-file {file} is not UTF-8 text; write one key per line") from None
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
                f"{place}: the name (the first of the two words) may have at most 64 characters: letters, digits "
                "and ._-"
            )
        entries.append((place, name, words[-1]))
    if not entries:
        raise UserError(
            f"--api-key-file {file} contains no key; add one, or leave the option out to allow access without a key"
        )
    return entries


def _check_key(place: str, key: str, min_length: int) -> None:
    if len(key) < min_length:
        raise UserError(f"{place}: the key has {len(key)} characters; give it at least {min_length}")
    if not KEY.fullmatch(key):
        raise UserError(f"{place}: the key has characters other than visible ASCII; use letters, digits and -._~+/=")
