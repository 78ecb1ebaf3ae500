"""HTTPS and passwords of the exporter process, and what happens when their files change."""

from __future__ import annotations

import base64
import http.client
import itertools
import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bcrypt
import pytest

from lockd.process import privileges
from lockd.process.clock import cpu_seconds
from tests.support.exporter_process import PATIENT, Exporter, exporter, shared_directory

PATIENCE = 120
"""Seconds that an answer may take on a busy host."""


def certificate(directory: Path, name: str, *options: str) -> Path:
    """Make a self-signed certificate for `name` and its key, which everybody can read. Return its path."""
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-addext",
            f"subjectAltName=DNS:{name},IP:127.0.0.1",
            "-keyout",
            directory / f"{name}.key",
            "-out",
            directory / f"{name}.crt",
            *options,
        ],
        check=True,
        capture_output=True,
    )
    (directory / f"{name}.key").chmod(0o644)
    return directory / f"{name}.crt"


def password_hash(password: str, rounds: int = 4) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(rounds)).decode()


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def trusting(path: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(path))


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o644)
    new.rename(path)


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_directory() as directory:
        yield directory


def test_https_with_passwords(shared: Path) -> None:
    trusted = certificate(shared, "localhost")
    config = shared / "web.yml"
    config.write_text(
        "tls_server_config:\n  cert_file: localhost.crt\n  key_file: localhost.key\n"
        "  min_version: TLS13\n"
        "http_server_config:\n  headers:\n    Strict-Transport-Security: max-age=60\n"
        f"basic_auth_users:\n  alice: {password_hash('secret')}\n"
    )
    with exporter(f"--web-config={config}") as running:
        running.tls = trusting(trusted)
        for path in ("/metrics", "/-/healthy", "/nothing", "/"):
            status, headers, _ = running.ask(path)
            assert (status, headers["WWW-Authenticate"]) == (401, 'Basic realm="lockd"')
            assert headers["Strict-Transport-Security"] == "max-age=60"
            assert running.ask(path, headers=basic("alice", "wrong"))[0] == 401
            assert running.ask(path, headers=basic("bob", "secret"))[0] == 401
        for wrong in ("Basic", "Basic !", "Bearer x", "Basic YQ==", "Basic //8="):
            assert running.ask("/metrics", headers={"Authorization": wrong})[0] == 401
        status, headers, body = running.ask("/metrics", headers=basic("alice", "secret"))
        assert (status, headers["Strict-Transport-Security"]) == (200, "max-age=60")
        assert b"lockd_futex_waiting" in body
        older = trusting(trusted)
        older.maximum_version = ssl.TLSVersion.TLSv1_2
        running.tls = older
        with pytest.raises((ssl.SSLError, ConnectionError)):
            running.ask("/-/healthy")
        running.tls = None
        with pytest.raises(OSError):  # plain HTTP on the same port
            running.ask("/-/healthy")
        assert "Traceback" not in running.stderr()


def test_clients_that_never_shake_hands_delay_nobody_and_do_not_stay(shared: Path) -> None:
    trusted = certificate(shared, "localhost")
    config = shared / "web.yml"
    config.write_text("tls_server_config: {cert_file: localhost.crt, key_file: localhost.key}\n")
    with exporter(f"--web-config={config}", run=PATIENT) as running:
        silent = [running.connect() for _ in range(50)]
        running.tls = trusting(trusted)
        assert running.ask("/metrics", timeout=PATIENCE)[0] == 200
        for client in silent:
            client.close()
    with exporter(f"--web-config={config}") as running:
        silent = [running.connect() for _ in range(50)]
        for client in silent:
            client.settimeout(PATIENCE)
            assert client.recv(1) == b""
            client.close()


def test_clients_with_certificates(shared: Path) -> None:
    trusted = certificate(shared, "localhost")
    certificate(shared, "prometheus.example")
    certificate(shared, "other.example")
    signers = shared / "ca.crt"
    signers.write_text(
        "".join((shared / f"{name}.example.crt").read_text() for name in ("prometheus", "other"))
    )
    config = shared / "web.yml"
    config.write_text(
        "tls_server_config:\n  cert_file: localhost.crt\n  key_file: localhost.key\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.crt\n"
        "  client_allowed_sans: [prometheus.example]\n"
    )
    with exporter(f"--web-config={config}") as running:
        running.tls = trusting(trusted)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            running.ask("/metrics")
        for name, status in (("prometheus", 200), ("other", 403)):
            running.tls = trusting(trusted)
            running.tls.load_cert_chain(shared / f"{name}.example.crt", shared / f"{name}.example.key")
            assert running.ask("/metrics")[0] == status


def test_changes_are_taken_up_and_mistakes_are_not(shared: Path) -> None:
    first = certificate(shared, "localhost")
    config = shared / "web.yml"
    tls = "tls_server_config: {cert_file: localhost.crt, key_file: localhost.key}\n"
    config.write_text(tls)
    config.chmod(0o644)
    with exporter(f"--web-config={config}") as running:
        running.tls = trusting(first)
        assert running.ask("/metrics")[0] == 200

        replace(config, tls + "nonsense: 1\n")
        assert running.ask("/metrics")[0] == 200
        assert running.ask("/metrics")[0] == 200
        said = running.stderr()
        assert said.count("nonsense: unknown key") == 1
        assert "stays in use" in said

        replace(config, tls)
        (shared / "second").mkdir(mode=0o755)
        second = certificate(shared / "second", "localhost")
        (shared / "second" / "localhost.key").rename(shared / "localhost.key")
        assert running.ask("/metrics")[0] == 200  # the old pair is used while the files do not match
        second.rename(first)
        running.tls = trusting(first)
        assert running.ask("/metrics")[0] == 200

        replace(config, f"{tls}basic_auth_users: {{alice: {password_hash('one')}}}\n")
        assert running.ask("/metrics")[0] == 401
        assert running.ask("/metrics", headers=basic("alice", "one"))[0] == 200
        replace(config, f"{tls}basic_auth_users: {{alice: {password_hash('two')}}}\n")
        assert running.ask("/metrics", headers=basic("alice", "one"))[0] == 401
        assert running.ask("/metrics", headers=basic("alice", "two"))[0] == 200
        config.unlink()
        assert running.ask("/metrics", headers=basic("alice", "two"))[0] == 200
        assert "cannot read this configuration" in running.stderr()
        replace(config, "{}")
        running.ask("/metrics", headers=basic("alice", "two"))
        assert "no longer has basic_auth_users, tls_server_config; rule: " in running.stderr()
        assert running.ask("/metrics")[0] == 401


def test_what_a_connection_must_have_holds_for_open_ones_too(shared: Path) -> None:
    trusted = certificate(shared, "localhost")
    certificate(shared, "prometheus.example")
    tls = "tls_server_config:\n  cert_file: localhost.crt\n  key_file: localhost.key\n"
    demand = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: prometheus.example.crt\n"
    config = shared / "web.yml"
    config.write_text("{}\n")
    with exporter(f"--web-config={config}") as running:
        plain = http.client.HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE)
        assert status_on(plain) == status_on(plain) == 200
        replace(config, tls)
        with pytest.raises(ConnectionError):
            status_on(plain)
        context = trusting(trusted)
        secure = http.client.HTTPSConnection("127.0.0.1", running.port, timeout=PATIENCE, context=context)
        assert status_on(secure) == 200
        replace(config, f"{tls}http_server_config: {{headers: {{X-Frame-Options: deny}}}}\n")
        assert status_on(secure) == 200
        replace(config, tls + demand)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            status_on(secure)
        context.load_cert_chain(shared / "prometheus.example.crt", shared / "prometheus.example.key")
        assert status_on(secure) == status_on(secure) == 200  # it has connected anew
        assert "Traceback" not in running.stderr()


def status_on(connection: http.client.HTTPConnection) -> int:
    """Return the status of a request on this connection, which stays open."""
    connection.request("GET", "/-/healthy")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_an_exporter_that_takes_the_place_of_another_opens_nothing(shared: Path) -> None:
    config = shared / "web.yml"
    config.write_text("{}\n")
    kept = os.memfd_create("web-kept")
    options = (f"--web-config={config}", f"--web-kept-fd={kept}")
    with exporter(*options, fds=[kept]) as running:
        assert running.ask("/metrics")[0] == 200
        replace(config, f"basic_auth_users: {{alice: {password_hash('secret')}}}\n")
        assert running.ask("/metrics")[0] == 401
    with exporter(*options, fds=[kept]) as running:
        assert running.ask("/metrics", headers=basic("alice", "secret"))[0] == 200
    replace(config, "{}\n")
    with (
        pytest.raises(AssertionError, match="no longer has basic_auth_users; rule: "),
        exporter(*options, fds=[kept]),
    ):
        pass
    os.close(kept)


def test_a_right_password_is_checked_once_and_wrong_ones_do_not_delay_it(shared: Path) -> None:
    config = shared / "web.yml"
    config.write_text(
        f"basic_auth_users: {{alice: {password_hash('secret', 11)}, bob: {password_hash('other', 8)}}}\n"
    )
    with exporter(f"--web-config={config}") as running:
        assert _processor_seconds(running, "secret") > 4 * _processor_seconds(running, "secret")
        with ThreadPoolExecutor(60) as pool:
            wrong = [
                pool.submit(running.ask, "/metrics", headers=basic("bob", str(n)), timeout=PATIENCE)
                for n in range(60)
            ]
            _processor_seconds(running, "secret")
            assert not all(each.done() for each in wrong)
            statuses = [each.result()[0] for each in wrong]
        assert set(statuses) == {401, 429}


def test_a_right_password_gets_its_turn_among_wrong_ones_from_the_same_address(shared: Path) -> None:
    config = shared / "web.yml"
    config.write_text(f"basic_auth_users: {{alice: {password_hash('secret', 8)}}}\n")
    refused: list[int] = []
    is_over = threading.Event()

    def guess(first: int) -> None:
        for number in itertools.count(first, 1000):
            if is_over.is_set():
                break
            refused.append(running.ask("/metrics", headers=basic("alice", str(number)), timeout=PATIENCE)[0])

    with exporter(f"--web-config={config}") as running, ThreadPoolExecutor(20) as pool:
        guessing = [pool.submit(guess, number) for number in range(20)]
        try:
            while len(refused) < 100:  # soon after, the saved time for wrong passwords is used up
                time.sleep(0.01)
            assert running.ask("/-/healthy", headers=basic("alice", "secret"), timeout=PATIENCE)[0] == 200
        finally:
            is_over.set()
        for each in guessing:
            each.result()
    assert set(refused) == {401}


def _processor_seconds(running: Exporter, password: str) -> float:
    """Return the CPU seconds that the exporter takes to answer a request with the right password."""
    before = cpu_seconds(running.process.pid)
    assert running.ask("/-/healthy", headers=basic("alice", password), timeout=PATIENCE)[0] == 200
    return cpu_seconds(running.process.pid) - before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes another user")
def test_the_key_is_read_as_the_user_that_serves_and_may_be_for_it_alone(shared: Path) -> None:
    user = privileges.unprivileged_user("lockd")
    assert user
    trusted = certificate(shared, "localhost")
    key = shared / "localhost.key"
    key.chmod(0o400)
    config = shared / "web.yml"
    config.write_text("tls_server_config: {cert_file: localhost.crt, key_file: localhost.key}\n")
    with pytest.raises(AssertionError) as failed, exporter(f"--web-config={config}"):
        pass
    said = str(failed.value)
    assert f"tls_server_config.key_file: cannot read {key} as user {user}: Permission denied; rule: " in said
    assert f"chown lockd {key} && chmod 0400 {key}, and let lockd into" in said
    assert ("do not give the user nobody access, but make a user lockd" in said) == (user == "nobody")
    assert "Traceback" not in said
    shutil.chown(key, user)
    with exporter(f"--web-config={config}") as running:
        running.tls = trusting(trusted)
        assert running.ask("/metrics")[0] == 200
