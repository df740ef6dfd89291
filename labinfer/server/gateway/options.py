"""Options of ``launch.py serve``, and the setup of a gateway process."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from labinfer.base.config import MAX_PORT, MAX_TIMEOUT
from labinfer.base.errors import UserError
from labinfer.base.option_fields import flag_name, option
from labinfer.base.plugins import PluginSource
from labinfer.server.gateway.otlp_endpoint import check_library, traces_url

MIB = 1 << 20
ORIGIN = re.compile(r"https?://[^\s/?#]+", re.IGNORECASE)
BACKLOG = 2048
"""Listen backlog: connections waiting to be accepted."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address, callers and limits of the server. A caller is an API key, or the user a request names."""

    host: str = option(
        "127.0.0.1",
        "address to listen on; 0.0.0.0 for all of this machine's, :: for those of IPv6, too",
        metavar="ADDRESS",
    )
    port: int = option(8000, "TCP port to listen on; 0 for one that is free", metavar="N")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names by which the server may be reached beside localhost, this machine's name and addresses, and whose pages may "
        "change something; * for any name",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "sites whose pages may use the API from a browser (CORS), such as https://chat.example; * for any site",
        metavar="ORIGIN",
    )
    api_key: tuple[str, ...] = option(
        (),
        "only requests with this key are answered; may be given several times. Other users of the machine can read "
        "command lines: --api-key-file hides the keys from them",
        metavar="KEY",
        secret=True,
    )
    api_key_file: str = option("", "file of such keys: one a line, alone or after a name and a space", metavar="FILE")
    metrics_open: bool = option(False, "answer /metrics without a key")
    ssl_certfile: str = option(
        "", "certificate in PEM, with those that vouch for it; the server then speaks HTTPS only", metavar="FILE"
    )
    ssl_keyfile: str = option("", "key of that certificate, where it is not in the same file", metavar="FILE")
    max_concurrent_requests: int = option(0, "requests of one caller at once; 0 for any number", metavar="N")
    max_waiting_per_caller: int = option(
        0, "requests of one caller that wait for their turn beyond those; further ones are refused", metavar="N"
    )
    tokens_per_minute: int = option(
        0, "tokens of prompts and answers together for one caller; 0 for any number", metavar="N"
    )
    max_connections: int = option(
        2048,
        "connections that are open at once; beyond them, the one that has been without a whole request for longest is "
        "closed. 0 for any number",
        metavar="N",
    )
    max_open_requests: int = option(
        1024, "requests of all callers that are open at once; 0 for any number", metavar="N"
    )
    keep_alive: float = option(
        5.0,
        "seconds for which a connection without a request stays open; proxies want more than their own",
        metavar="S",
    )
    ignore_unknown_fields: bool = option(
        False, "leave unknown fields of requests out, with a warning in a header, instead of refusing them"
    )
    request_timeout: float = option(600.0, "seconds after which a request is cancelled; 0 for never", metavar="S")
    max_body_size: int = option(16, "MiB of a request's body at most", metavar="MIB", least=1)
    max_body_memory: int = option(
        64,
        "MiB that the bodies of all requests may have together until they are tokenized, and one caller's half of it; "
        "those up to 64 KiB are not counted",
        metavar="MIB",
        least=1,
    )
    max_preparing_per_caller: int = option(
        8,
        "long prompts of one caller that wait to be tokenized, and new forms of answers that wait to be tried; further ones "
        "are refused",
        metavar="N",
        least=1,
    )
    max_stored_responses: int = option(
        1024, "responses of /v1/responses that are kept in memory for later requests; 0 for none", metavar="N"
    )
    max_stored_size: int = option(64, "MiB that they take at most", metavar="MIB", least=1)
    files_dir: str = option(
        "",
        "folder in which /v1/files and /v1/batches keep what they are given and what comes of it, also for the server after "
        "this one; without it they are refused",
        metavar="DIR",
    )
    max_file_size: int = option(200, "MiB of one of these files at most", metavar="MIB", least=1)
    max_files_size: int = option(
        10240,
        "MiB of all of them, and one caller's half of it; results of batches are always kept",
        metavar="MIB",
        least=1,
    )
    max_batch_requests: int = option(16, "requests of all batches that are open at once", metavar="N", least=1)
    drain_timeout: float = option(
        20.0,
        "seconds that open requests have to come to their ends when the server is stopped; where it is more than 25, tell "
        "torchrun, too, with its --shutdown-timeout",
        metavar="S",
    )
    replan: str = option(
        "off",
        "auto changes the split of the layers where another one has promised to do 15 % more for half a minute, as when a machine has become "
        "slower, and does more in ten minutes than the pause costs; off only says so",
        choices=("off", "auto"),
    )
    otlp_traces_endpoint: str = option(
        "",
        "URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces, to which a span per request is sent (OTLP over "
        "HTTP)",
        metavar="URL",
    )
    log_json: bool = option(False, "log every finished request as a JSON object, one a line, instead of text")

    @property
    def is_local(self) -> bool:
        """Whether the address is reachable from this machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return "https" if self.ssl_certfile else "http"

    def absolute(self) -> ServerOptions:
        """Copy with absolute paths, as the gateway has another working directory.

        Raises:
            UserError: the certificate cannot be used, or the OpenTelemetry library is missing.
        """
        if self.otlp_traces_endpoint:
            check_library()
        names = ("api_key_file", "ssl_certfile", "ssl_keyfile", "files_dir")
        paths = {name: str(Path(path).resolve()) for name in names if (path := getattr(self, name))}
        if self.ssl_certfile:
            import ssl  # here, because every command imports this file

            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                    self.ssl_certfile, self.ssl_keyfile or None
                )
            except OSError as error:  # SSLError is an OSError too
                raise UserError(
                    f"--ssl-certfile {self.ssl_certfile} and --ssl-keyfile {self.ssl_keyfile or '(not given)'} cannot be "
                    f"used: {error.strerror or error}"
                ) from None
        return replace(self, **paths)

    def __post_init__(self) -> None:
        if self.port > MAX_PORT:
            raise UserError(f"--port must be at most {MAX_PORT}, not {self.port}")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise UserError(f"--ssl-keyfile {self.ssl_keyfile} is the key of a certificate; add --ssl-certfile")
        if self.max_waiting_per_caller and not self.max_concurrent_requests:
            raise UserError(
                f"--max-waiting-per-caller {self.max_waiting_per_caller} says how many wait when "
                "--max-concurrent-requests are open; add --max-concurrent-requests"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise UserError(
                    f"--allowed-origins {origin!r:.80} must be a scheme and a host, such as https://chat.example, or *"
                )
        if self.otlp_traces_endpoint:
            traces_url(self.otlp_traces_endpoint)
        for name in ("request_timeout", "drain_timeout", "keep_alive"):
            seconds = getattr(self, name)
            if not seconds < MAX_TIMEOUT:  # also true for NaN
                raise UserError(f"{flag_name(name)} must be under {MAX_TIMEOUT:g} seconds, not {seconds}")


class Setup(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Setup of a gateway process, sent on its standard input."""

    options: ServerOptions
    model_names: list[str]
    """Served models; the first is the default."""
    cpus: list[int]
    """CPU cores of its affinity mask."""
    log_level: str
    token: str
    """Secret that authenticates its host."""
    fault_timeout: float
    """Seconds without a heartbeat of the host until it is considered dead."""
    plugins: list[PluginSource] = []
    """Plugins of the ranks. The gateway does not import them; it accepts the request parameters that they add."""
    outlives_host: bool = False
    """Whether to wait for another host if one dies without ``Shutdown``; otherwise the gateway ends."""
