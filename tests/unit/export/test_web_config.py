"""Tests of what the web configuration file may say, and of the errors about mistakes in it."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockd.errors import ConfigError, HostError, LockdError
from lockd.export import web_config_file
from lockd.export.web_config import Settings, WebConfig
from lockd.process import isolation
from lockd.service.exporter import check_web_config
from tests.support.exporter_process import REPOSITORY, shared_directory
from tests.unit.export.test_tls import certificate, trusting

HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"


def read(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "web.yml"
    path.write_text(text)
    return WebConfig(path).current()


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    return str(raised.value).replace(f"{tmp_path}/", "").splitlines()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "tls_server_config:\n",
        "http_server_config: {http2: false}\n",
        "basic_auth_users: {}",
    ],
)
def test_nothing_is_plain_http_for_everybody(tmp_path: Path, text: str) -> None:
    settings = read(tmp_path, text)
    assert (settings.tls, dict(settings.users), dict(settings.headers)) == (None, {}, {})
    assert WebConfig(None).current().tls is None


def test_users_and_headers(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        f"basic_auth_users:\n  alice: {HASH}\n"
        "http_server_config:\n  http2: true\n  headers:\n    X-Frame-Options: deny\n",
    )
    assert settings.users == {"alice": HASH}
    assert settings.headers == {"X-Frame-Options": "deny"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("basic_auth_user: {}", 'web.yml:1: basic_auth_user: unknown key; did you mean "basic_auth_users"?'),
        (
            "tls_server_config: {certfile: a}",
            'web.yml:1: tls_server_config.certfile: unknown key; did you mean "cert_file"?',
        ),
        (
            "tls_server_config: {cert_file: a}",
            "web.yml:1: tls_server_config: {cert_file: a} has one of cert_file and key_file; TLS needs both",
        ),
        ("tls_server_config: {min_version: TLS11}", "min_version: TLS11 is not one of TLS12, TLS13"),
        ("tls_server_config: {max_version: TLS14}", "max_version: TLS14 is not one of TLS12, TLS13"),
        (
            "tls_server_config: {min_version: TLS13, max_version: TLS12}",
            "min_version: TLS13 is above max_version, TLS12",
        ),
        (
            "tls_server_config: {client_auth_type: RequireAnyClientCert}",
            "client_auth_type: RequireAnyClientCert is not in this release",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
            "client_auth_type: RequireAndVerifyClientCert needs a client_ca_file",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}",
            "client_ca_file: c needs a client_auth_type",
        ),
        ("tls_server_config: {client_ca_file: c}", "asks clients for certificates"),
        ('tls_server_config: {client_ca_file: "a\\0"}', '"a\\0" is not a file name'),
        ('tls_server_config: {client_ca_file: "\\ud800"}', '"\\ud800" is not a file name'),
        ("tls_server_config: {client_allowed_sans: [a]}", "client_allowed_sans: [a] needs"),
        (
            "tls_server_config: {cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]}",
            "cipher_suites[0]: TLS_RSA_WITH_RC4_128_SHA is not one of",
        ),
        ("tls_server_config: {curve_preferences: [X25519, CurveP256]}", "at most one curve"),
        ("tls_server_config: {cert: abc}", "cert: abc cannot be given to lockd: use cert_file"),
        ("rate_limit: {burst: 1}", "rate_limit: {burst: 1} cannot be given to lockd"),
        (
            "http_server_config: {headers: {X-Frame-Option: deny}}",
            'X-Frame-Option is not one of the headers that can be set; did you mean "X-Frame-Options"?',
        ),
        (
            "http_server_config: {headers: {X-Frame-Options: never}}",
            "headers.X-Frame-Options: never is not deny or sameorigin",
        ),
        ('http_server_config: {headers: {X-XSS-Protection: "a\\r\\nb"}}', "one line of text"),
        ("basic_auth_users: [alice]", "is not a mapping of user names to bcrypt hashes"),
        (
            f"basic_auth_users: {{a: {HASH.replace('$10$', '$15$')}}}",
            "a has a bcrypt hash of cost 15, so each check of a password would take 2 s or so;"
            " rule: at most 14",
        ),
        (f"basic_auth_users: {{'a:b': {HASH}}}", "is not a user name: text without a colon"),
        (f"basic_auth_users: {{a: {HASH}, a: {HASH}}}", "a is given twice"),
        ("", "web.yml: empty; rule: {} if nothing is to be set"),
        ("# nothing\n", "web.yml: empty"),
        ("a: b: c", "not valid YAML"),
        ("- a", "is not a section"),
    ],
)
def test_mistakes_are_named_with_their_rule(tmp_path: Path, text: str, says: str) -> None:
    (line,) = problems(tmp_path, text)
    assert says in line


def test_all_mistakes_at_once_and_no_password_among_them(tmp_path: Path) -> None:
    found = problems(tmp_path, "basic_auth_users: {alice: hunter2, bob: $2y$10$short}\nfoo: 1\n")
    assert len(found) == 3
    assert "alice has no bcrypt hash of a password" in found[0]
    assert "hunter2" not in "".join(found)


def test_files_that_are_not_certificates(tmp_path: Path) -> None:
    config = "tls_server_config: {cert_file: cert.pem, key_file: key.pem}"
    (missing,) = problems(tmp_path, config)
    assert "tls_server_config.cert_file: cannot read cert.pem: No such file or directory" in missing
    (tmp_path / "cert.pem").write_text("nonsense")
    (tmp_path / "key.pem").write_text("nonsense")
    (wrong,) = problems(tmp_path, config)
    assert "cannot use cert.pem with key.pem" in wrong


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "."])
def test_a_certificate_is_a_regular_file(tmp_path: Path, name: str) -> None:
    """A file of another sort is refused: opening a pipe, for instance, would wait until somebody writes."""
    os.mkfifo(tmp_path / "pipe")
    (says,) = problems(tmp_path, f"tls_server_config: {{cert_file: {name}, key_file: {name}}}")
    assert "tls_server_config.cert_file: cannot read " in says
    assert says.endswith(": it is no regular file")


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def test_a_file_that_is_being_written_opens_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any beginning of the file leaves users, TLS and the need for client certificates as they were."""
    certificate(tmp_path, "localhost")
    (tmp_path / "ca.crt").write_bytes((tmp_path / "localhost.crt").read_bytes())
    whole = (
        "tls_server_config:\n  cert_file: localhost.crt\n  key_file: localhost.key\n"
        "  client_ca_file: ca.crt\n  client_auth_type: RequireAndVerifyClientCert\n"
        f"  client_allowed_sans:\n    - prometheus.example\nbasic_auth_users:\n  alice: {HASH}\n"
    )
    path = tmp_path / "web.yml"
    path.write_text(whole)
    web = WebConfig(path)
    before = web.current()
    for length in range(len(whole) - 1):
        replace(path, whole[:length])
        caplog.clear()
        assert web.current() is before, whole[:length]
        assert web.current() is before
        assert [record.levelname for record in caplog.records] == ["ERROR"]
    replace(path, whole)
    assert web.current().users == before.users


@pytest.mark.parametrize(
    ("then", "lost"),
    [
        ("{}", "basic_auth_users, tls_server_config"),
        ("http_server_config: {headers: {X-Frame-Options: deny}}", "basic_auth_users, tls_server_config"),
        (f"basic_auth_users: {{bob: {HASH}}}", "tls_server_config"),
        ("tls_server_config: {cert_file: localhost.crt, key_file: localhost.key}", "basic_auth_users"),
    ],
)
def test_users_and_tls_are_never_lost_while_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, then: str, lost: str
) -> None:
    certificate(tmp_path, "localhost")
    path = tmp_path / "web.yml"
    tls = "tls_server_config: {cert_file: localhost.crt, key_file: localhost.key}\n"
    path.write_text(f"{tls}basic_auth_users: {{alice: {HASH}}}\n")
    web = WebConfig(path)
    before = web.current()
    replace(path, then)
    assert web.current() is before
    assert f"no longer has {lost}; rule: " in caplog.text
    assert "restart" in caplog.text
    assert (web.current(), len(caplog.records)) == (before, 1)
    replace(path, f"{tls}basic_auth_users: {{bob: {HASH}}}\n")
    assert web.current().users == {"bob": HASH}


@pytest.mark.parametrize("change", [lambda path: path.chmod(0o400), lambda path: os.chown(path, 12345, 0)])
def test_a_file_is_read_again_when_its_mode_or_owner_has_changed(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode and owner matter: the error about a file that lockd may not read says how to change them."""
    if os.geteuid():
        pytest.skip("host: only root can give a file to somebody else")
    path, reads = tmp_path / "web.yml", [0]
    path.write_text(f"basic_auth_users: {{alice: {HASH}}}\n")
    read = web_config_file.read_web_file

    def unreadable_once(path: Path) -> web_config_file.WebFile:
        reads[0] += 1
        if reads[0] == 2:
            raise ConfigError(f"{path}: cannot read this configuration as user lockd")
        return read(path)

    monkeypatch.setattr(web_config_file, "read_web_file", unreadable_once)
    web = WebConfig(path)
    replace(path, f"basic_auth_users: {{bob: {HASH}}}\n")
    assert set(web.current().users) == {"alice"}
    assert (set(web.current().users), reads[0]) == ({"alice"}, 2)
    change(path)
    assert (set(web.current().users), reads[0]) == ({"bob"}, 3)


def ciphers(tmp_path: Path, more: str) -> set[str]:
    tls = read(
        tmp_path, f"tls_server_config: {{cert_file: localhost.crt, key_file: localhost.key{more}}}"
    ).tls
    assert tls
    return {each["name"] for each in tls.get_ciphers() if each["protocol"] != "TLSv1.3"}


def test_ciphers_of_tls_1_2_forget_their_keys_and_are_no_cbc(tmp_path: Path) -> None:
    certificate(tmp_path, "localhost")
    found = ciphers(tmp_path, "")
    assert {"ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-RSA-AES256-GCM-SHA384"} <= found
    assert all(re.fullmatch("ECDHE-(ECDSA|RSA)-.*(GCM|POLY1305).*", name) for name in found)
    asked = ciphers(tmp_path, ", cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA]")
    assert asked == {"ECDHE-RSA-AES128-SHA"}


@pytest.mark.parametrize("version", web_config_file.VERSIONS)
def test_a_handshake_with_each_version_succeeds(tmp_path: Path, version: str) -> None:
    """OpenSSL has versions that it takes as a limit, and with which every handshake fails."""
    trusted = certificate(tmp_path, "localhost")
    names = "cert_file: localhost.crt, key_file: localhost.key"
    settings = read(
        tmp_path, f"tls_server_config: {{{names}, min_version: {version}, max_version: {version}}}"
    )
    assert settings.tls
    client = trusting(trusted)
    client.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        settings.tls.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
    ]
    for end in ends * 4:  # more turns than any version takes
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert [end.version() for end in ends] == [version.replace("TLS1", "TLSv1.")] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "web.yml: cannot read this configuration: No such file or directory"),
        ("", "web.yml: empty"),
        ("nonsense: 1", "web.yml:1: nonsense: unknown key"),
        (f"basic_auth_users: {{alice: {HASH}}}", ""),
    ],
)
def test_the_exporter_checks_it_as_the_user_that_serves(text: str | None, says: str) -> None:
    with shared_directory() as directory:
        path = directory / "web.yml"
        if text is not None:
            path.write_text(text)
        if not says:
            check_web_config(path)
            path.chmod(0o000 if os.geteuid() else 0o600)
            says = "web.yml: cannot read this configuration as user "
        with pytest.raises(ConfigError) as raised:
            check_web_config(path)
    assert says in str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("code", "kind"), [(2, ConfigError), (3, HostError), (1, LockdError), (-9, LockdError)]
)
def test_a_check_that_fails_says_whose_fault_it_is(
    code: int, kind: type[LockdError], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    monkeypatch.setattr(isolation, "command", lambda module: [sys.executable, "-c", ends])
    with pytest.raises(LockdError) as raised:
        check_web_config(Path("web.yml"))
    assert type(raised.value) is kind
    assert "web.yml: the exporter, which checks it, ended" in str(raised.value)


@pytest.mark.parametrize("flag", [True, False])
def test_check_refuses_a_web_configuration_that_is_not_there(tmp_path: Path, flag: bool) -> None:
    config = tmp_path / "lockd.yaml"
    config.write_text("period: 50ms\n" if flag else f"web: {{config_file: {tmp_path}/none.yml}}\n")
    command = [sys.executable, "-m", "lockd", "check", f"--config.file={config}"]
    command += [f"--web.config.file={tmp_path}/none.yml"] if flag else []
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lockd: error: {tmp_path}/none.yml: cannot read this configuration")
    assert "Traceback" not in done.stderr
