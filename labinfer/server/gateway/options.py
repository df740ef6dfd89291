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
"""Listen backlog of the socket for clients: maximum number of connections that wait to be accepted."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address, access and limits of the server. A caller is an API key, or the user that a request names."""

    host: str = option(
        "127.0.0.1",
        "address to listen on; 0.0.0.0 for all IPv4 addresses of this machine, :: for IPv6 as well",
        metavar="ADDRESS",
    )
    port: int = option(8000, "TCP port to listen on; 0 for any free port", metavar="N")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "host names by which clients may reach the server, in addition to localhost, IP addresses and this "
        "machine's name; pages of these hosts may send POST and DELETE requests; * for any name",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origins whose pages may call the API from a browser (CORS), such as https://chat.example; * for any origin",
        metavar="ORIGIN",
    )
    api_key: tuple[str, ...] = option(
        (),
        "API key that requests must carry; repeatable. Other users of the machine can read command lines: "
        "--api-key-file hides the keys from them",
        metavar="KEY",
        secret=True,
    )
    api_key_file: str = option("", "file of API keys, one per line: KEY, or NAME KEY", metavar="FILE")
    metrics_open: bool = option(False, "serve /metrics without an API key")
    ssl_certfile: str = option(
        "", "PEM certificate, followed by its chain; the server then speaks HTTPS only", metavar="FILE"
    )
    ssl_keyfile: str = option("", "private key of --ssl-certfile, if it is in a file of its own", metavar="FILE")
    max_concurrent_requests: int = option(
        0, "maximum number of concurrent requests per caller (API key or user); 0 for no limit", metavar="N"
    )
    max_waiting_per_caller: int = option(
        0, "requests per caller that wait when --max-concurrent-requests is reached; more are rejected", metavar="N"
    )
    tokens_per_minute: int = option(
        0, "rate limit per caller in tokens per minute, prompt and output tokens together; 0 for no limit", metavar="N"
    )
    max_connections: int = option(
        2048,
        "maximum number of open connections; at the limit, the connection that has gone longest without a complete "
        "request is closed; 0 for no limit",
        metavar="N",
    )
    max_open_requests: int = option(1024, "maximum number of open requests of all callers; 0 for no limit", metavar="N")
    keep_alive: float = option(
        5.0,
        "seconds until an idle connection is closed; behind a reverse proxy, set it above the proxy's idle timeout",
        metavar="S",
    )
    ignore_unknown_fields: bool = option(
        False,
        "ignore unknown fields of requests, with a warning in a response header, instead of rejecting the request",
    )
    request_timeout: float = option(600.0, "seconds until a request is cancelled; 0 for no limit", metavar="S")
    max_body_size: int = option(16, "maximum size of a request body, in MiB", metavar="MIB", least=1)
    max_body_memory: int = option(
        64,
        "memory for all request bodies that wait for tokenization, in MiB, at most half of it per caller; bodies up "
        "to 64 KiB do not count",
        metavar="MIB",
        least=1,
    )
    max_preparing_per_caller: int = option(
        8,
        "long prompts per caller that wait for tokenization, and new schemas of structured outputs that wait for "
        "compilation; more are rejected",
        metavar="N",
        least=1,
    )
    max_stored_responses: int = option(
        1024, "responses of /v1/responses kept in memory for later requests; 0 stores none", metavar="N"
    )
    max_stored_size: int = option(64, "maximum memory for the stored responses, in MiB", metavar="MIB", least=1)
    files_dir: str = option(
        "",
        "directory for the files of /v1/files and /v1/batches, which a restarted server continues to use; without "
        "it, both routes reject requests",
        metavar="DIR",
    )
    max_file_size: int = option(200, "maximum size of a file of /v1/files, in MiB", metavar="MIB", least=1)
    max_files_size: int = option(
        10240,
        "maximum total size of the files, in MiB, at most half of it per caller; results of batches are always kept",
        metavar="MIB",
        least=1,
    )
    max_batch_requests: int = option(
        16, "maximum number of open requests of all batches together", metavar="N", least=1
    )
    drain_timeout: float = option(
        20.0,
        "seconds that open requests may take to finish when the server stops; above 25, raise torchrun's "
        "--shutdown-timeout as well",
        metavar="S",
    )
    replan: str = option(
        "off",
        "auto reloads the models in another layer split that for 30 s has promised 15 % more throughput (for example, "
        "because a machine became slower), if within 10 minutes the gain makes up for the pause of reloading; off only logs slow stages",
        choices=("off", "auto"),
    )
    otlp_traces_endpoint: str = option(
        "",
        "URL of an OpenTelemetry collector that receives a span per request (OTLP over HTTP), such as "
        "http://localhost:4318/v1/traces",
        metavar="URL",
    )
    log_json: bool = option(False, "log each finished request as one JSON object per line")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server's address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def scheme(self) -> str:
        """URL scheme: ``http`` or ``https``."""
        return "https" if self.ssl_certfile else "http"

    def absolute(self) -> ServerOptions:
        """Copy in which all paths are absolute, as the gateway process has another working directory.

        Raises:
            UserError: the certificate cannot be used, or the OpenTelemetry library is missing.
        """
        if self.otlp_traces_endpoint:
            check_library()
        names = ("api_key_file", "ssl_certfile", "ssl_keyfile", "files_dir")
        paths = {name: str(Path(path).resolve()) for name in names if (path := getattr(self, name))}
        if self.ssl_certfile:
            import ssl  # imported here, as every command imports this file and few need ssl

            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                    self.ssl_certfile, self.ssl_keyfile or None
                )
            except OSError as error:  # SSLError is a subclass of OSError
                raise UserError(
                    f"--ssl-certfile {self.ssl_certfile} and --ssl-keyfile {self.ssl_keyfile or '(not given)'} cannot be "
                    f"used: {error.strerror or error}"
                ) from None
        return replace(self, **paths)

    def __post_init__(self) -> None:
        if self.port > MAX_PORT:
            raise UserError(f"--port must be at most {MAX_PORT}, not {self.port}")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise UserError(f"--ssl-keyfile {self.ssl_keyfile} needs a certificate; add --ssl-certfile")
        if self.max_waiting_per_caller and not self.max_concurrent_requests:
            raise UserError(
                f"--max-waiting-per-caller {self.max_waiting_per_caller} needs --max-concurrent-requests; add it"
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
            if not seconds < MAX_TIMEOUT:  # written so that NaN is refused, too
                raise UserError(f"{flag_name(name)} must be under {MAX_TIMEOUT:g} seconds, not {seconds}")


class Setup(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Parameters of a gateway process, which it reads from standard input."""

    options: ServerOptions
    model_names: list[str]
    """Served models; the first is the default."""
    cpus: list[int]
    """CPU cores of the gateway's affinity mask."""
    log_level: str
    token: str
    """Secret that an engine host must send to the gateway."""
    fault_timeout: float
    """Seconds without a heartbeat after which the engine host counts as dead."""
    plugins: list[PluginSource] = []
    """Plugins of the ranks. The gateway does not import them; it accepts the request parameters that they add."""
    outlives_host: bool = False
    """Whether to wait for another engine host if one dies without ``Shutdown``; if not, the gateway ends, too."""
