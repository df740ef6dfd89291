"""HostCheck: protection against DNS rebinding and cross-site requests.

The owner of a web page can point the page's domain at this machine (DNS rebinding); page and server then have one origin. The
``Host`` header reveals this, as a page cannot choose the header. Any page can also make a browser send requests to any address,
without seeing the answers; the ``Origin`` header (RFC 6454) reveals such requests.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError

LOCAL = "localhost"
ANY = "*"
CHANGES_NOTHING = ("GET", "HEAD", "OPTIONS", "TRACE")
FLAG, ORIGINS_FLAG = "--allowed-hosts", "--allowed-origins"


class AllowedHosts:
    """Host names and origins that the server accepts.

    IP addresses are always accepted: DNS rebinding needs a host name.

    Args:
        names: accepted host names, in addition to names of this machine; ``*`` for any.
        listens_on: name or address of ``--host``.
        origins: origins of other sites whose pages may use the server; ``*`` for any.
    """

    def __init__(self, names: tuple[str, ...], listens_on: str, origins: tuple[str, ...] = ()):
        self._origins = {origin.lower() for origin in origins}
        self._given = {name.lower().rstrip(".") for name in names}
        self._names = self._given | {LOCAL, socket.gethostname().lower(), listens_on.lower()}

    def check(self, method: str, hosts: list[str], origin: str | None) -> None:
        """Refuse a request that a page of another site may have sent.

        Args:
            hosts: values of the ``Host`` header; programs may omit it, browsers never do.
            origin: value of the ``Origin`` header, if any.

        Raises:
            ApiError: the host name or the origin is not accepted.
        """
        for host in hosts:
            if host and not self._is_own(host):
                raise api_errors.wrong_host(host, FLAG)
        if origin is None or method in CHANGES_NOTHING or self._origins & {ANY, origin.lower()}:
            return
        netloc = origin.partition("://")[2].lower()
        if netloc not in (host.lower() for host in hosts) and _name(netloc) not in self._given:
            raise api_errors.foreign_origin(origin, FLAG, ORIGINS_FLAG)

    def _is_own(self, host: str) -> bool:
        name = _name(host)
        return ANY in self._given or name in self._names or name.endswith("." + LOCAL) or _is_address(name)


class HostCheck:
    """ASGI middleware that rejects requests to host names, or from origins, that ``AllowedHosts`` does not accept.

    Args:
        refuse: makes the error response.
    """

    def __init__(self, app: Callable, hosts: AllowedHosts, refuse: Callable[[Request, ApiError], Response]):
        self._app, self._hosts, self._refuse = app, hosts, refuse

    async def __call__(self, scope: dict, receive: Callable, send: Callable[[dict], Awaitable[None]]) -> None:
        answer = self._app
        if scope["type"] == "http":
            http = Request(scope, receive)
            try:
                self._hosts.check(http.method, http.headers.getlist("host"), http.headers.get("origin"))
            except ApiError as error:
                answer = self._refuse(http, error)
        await answer(scope, receive, send)


def _name(host: str) -> str:
    """Host name or address in the value ``host`` of a ``Host`` header (``name``, ``name:port`` or ``[address]:port``), in lower
    case; empty if ``host`` is invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
