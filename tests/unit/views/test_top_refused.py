"""`lockd top` without a daemon, or with something else that answers; passwords and TLS."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import needs
from tests.support.top_daemon import Daemon, fails, lock, serving, top


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving() as daemon:
        yield daemon


def test_no_daemon(daemon: Daemon) -> None:
    daemon.close()  # a port where certainly nobody listens
    message = fails(f"--url={daemon.url}")
    assert f"no daemon answers at {daemon.url}; start it with: lockd run" in message


def test_no_such_host() -> None:
    url = "http://host.invalid:9776"
    assert f"no daemon answers at {url}: " in fails(f"--url={url}")


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"{}", b'{"time": 1}', b'{"time": 1, "locks": [{}]}', b"[" * 100_000,
     json.dumps({"time": 1, "locks": [lock(kind=[])]}).encode(),
     json.dumps({"time": 1, "locks": [lock(blocked_us="x")]}).encode(),
     json.dumps({"time": 1, "locks": [lock(blocked_us=10**400)]}).encode(),
     json.dumps({"time": 1, "locks": [lock(waiting=float("inf"))]}).encode(),
     json.dumps({"time": float("nan"), "locks": []}).encode(),
     json.dumps({"time": 1, "monotonic": float("nan"), "locks": []}).encode(),
     json.dumps({"time": 1, "locks": [lock(blocked_us=None)]}).encode()],
)  # fmt: skip
def test_something_else_answers(daemon: Daemon, body: bytes) -> None:
    daemon.answer = (200, {}, body)
    assert f"{daemon.url}/api/v1/locks is not an answer of lockd: " in fails(f"--url={daemon.url}")


def test_an_error_status(daemon: Daemon) -> None:
    daemon.answer = (503, {}, b"")
    message = fails(f"--url={daemon.url}")
    assert f"{daemon.url}/api/v1/locks answered 503 Service Unavailable" in message


def test_a_password_is_sent_and_never_shown(daemon: Daemon) -> None:
    daemon.answer = (401, {}, b"")
    message = fails(f"--url=http://me:s%40cret@127.0.0.1:{daemon.port}/prefix/")
    assert "requires a user name and a password (401)" in message
    assert "cret" not in message
    expected = f"Basic {base64.b64encode(b'me:s@cret').decode()}"
    assert daemon.asked == [("/prefix/api/v1/locks?limit=1000", expected)]


def test_a_redirect_is_not_followed(daemon: Daemon) -> None:
    daemon.answer = (302, {"Location": f"{daemon.url}/elsewhere"}, b"")
    assert "answered 302" in fails(f"--url=http://me:secret@127.0.0.1:{daemon.port}")
    assert len(daemon.asked) == 1


def test_no_proxy_is_asked(daemon: Daemon) -> None:
    done = top("--once", f"--url={daemon.url}", http_proxy="http://127.0.0.1:1")
    assert done.returncode == 0


@needs("openssl")
def test_tls(daemon: Daemon, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    daemon.server.socket = context.wrap_socket(daemon.server.socket, server_side=True)
    url = daemon.url.replace("http:", "https:")
    assert f"{url}: its certificate is not trusted: " in fails(f"--url={url}")
    assert top("--once", f"--url={url}", "--insecure").returncode == 0
    trusted = top("--once", f"--url={url}", SSL_CERT_FILE=str(certificate))
    assert trusted.returncode == 0, trusted.stderr
