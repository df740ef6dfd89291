"""HTTPS, with a certificate for localhost that is good for a hundred years and secret to nobody."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest
from launchers import LAUNCH, run
from serving import serving

from labinfer.base.errors import UserError
from labinfer.server.gateway.options import ServerOptions

CERTIFICATE = str(Path(__file__).with_name("localhost.pem"))
KEY = str(Path(__file__).with_name("localhost.key"))


def test_server_speaks_https_only():
    with serving("--ssl-certfile", CERTIFICATE, "--ssl-keyfile", KEY) as server:
        assert server.url.startswith("https://")
        stream = server.stream({"prompt": [5, 6], "max_tokens": 3}).finish()
        assert (stream.status, stream.finish_reason, stream.was_cut) == (200, "length", False)
        server.url = server.url.replace("https", "http")
        with pytest.raises((OSError, http.client.HTTPException)):
            server.get("/health")


def test_certificate_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--ssl-keyfile .* add --ssl-certfile"):
        ServerOptions(ssl_keyfile=KEY)
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for certificate, key in ((CERTIFICATE, ""), (str(broken), KEY), (str(tmp_path / "none"), KEY)):
        with pytest.raises(UserError, match="cannot be used: "):
            ServerOptions(ssl_certfile=certificate, ssl_keyfile=key).absolute()
    done = run("single", 1, LAUNCH, "serve", "--ssl-certfile", broken)
    assert done.returncode == 2 and len(done.our_errors) == 1 and "KV cache" not in done.stderr
