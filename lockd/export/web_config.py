"""The web configuration file of Prometheus exporters: TLS, extra headers, users with passwords.

The format is that of Prometheus' exporter-toolkit. The file and the certificates that it names
are read again once they have changed; what is wrong then is logged, and what was before stays.
"""

from __future__ import annotations

import logging
import os
import pwd
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from lockd.config_reader import read_file
from lockd.errors import ConfigError
from lockd.export.web_config_keys import CIPHERS, CLIENTS, CURVES, VERSIONS, TlsServer, WebFile

log = logging.getLogger(__name__)

Signature = tuple[int, int, int] | None


@dataclass(frozen=True)
class Settings:
    """What one reading of the file says; the defaults are those without a file."""

    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    """Bcrypt hashes by user name; if there are none, anybody may ask."""
    tls: ssl.SSLContext | None = None
    client_names: frozenset[str] = frozenset()
    """If there are any, a client's certificate must have one of them as alternative name."""


class WebConfig:
    """The file at `path`; raises ConfigError if it is wrong at the start."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: dict[Path, Signature] = {}
        self._settings = Settings() if path is None else self._read(path)

    def current(self) -> Settings:
        """What the file says now. Cheap enough to be called for every request and connection."""
        if self._path and any(_signature(path) != was for path, was in self._seen.items()):
            try:
                self._settings = self._read(self._path)
                log.info("%s: read again, because it or a file that it names has changed", self._path)
            except ConfigError as error:
                log.error("the web configuration before this one stays in use: %s", error)
        return self._settings

    def _read(self, path: Path) -> Settings:
        # What the files look like is noted before they are read, so no change is missed.
        self._seen = {path: _signature(path)}
        file = read_file(WebFile, path)
        if file.basic_auth_users and find_spec("bcrypt") is None:
            raise ConfigError(
                f"{path}: basic_auth_users: Python's bcrypt is not installed;"
                " rule: passwords need it (Debian and Ubuntu: python3-bcrypt)"
            )
        tls = file.tls_server_config
        named = {
            key: path.parent / name
            for key, name in (
                ("cert_file", tls.cert_file),
                ("key_file", tls.key_file),
                ("client_ca_file", tls.client_ca_file),
            )
            if name
        }
        self._seen |= {path: _signature(path) for path in named.values()}
        return Settings(
            headers=dict(file.http_server_config.headers),
            users=dict(file.basic_auth_users),
            tls=_context(path, tls, named) if named else None,
            client_names=frozenset(tls.client_allowed_sans),
        )


def _context(config: Path, tls: TlsServer, files: Mapping[str, Path]) -> ssl.SSLContext:
    for key, path in files.items():
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(
                f"{config}: tls_server_config.{key}: cannot read {path} as user {_user()}:"
                f" {error.strerror}; rule: the process that answers the network runs as this user,"
                " so the file and the directories above must let it read"
            ) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[tls.min_version]
    context.maximum_version = VERSIONS[tls.max_version]
    if tls.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    try:
        context.load_cert_chain(files["cert_file"], files["key_file"], password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{config}: tls_server_config: cannot use {files['cert_file']} with"
            f" {files['key_file']}: {error}; rule: a certificate chain and its key, without a"
            " password, in PEM"
        ) from None
    try:
        if "client_ca_file" in files:
            context.load_verify_locations(files["client_ca_file"])
        context.verify_mode = CLIENTS[tls.client_auth_type]
        if tls.cipher_suites:
            context.set_ciphers(":".join(CIPHERS[name] for name in tls.cipher_suites))
        for name in tls.curve_preferences:
            context.set_ecdh_curve(CURVES[name])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{config}: tls_server_config: OpenSSL refuses it: {error};"
            " rule: client_ca_file is in PEM, and the ciphers and curves are ones that it has"
        ) from None
    return context


def _no_password() -> str:
    # Without this, OpenSSL would ask for one on the terminal.
    raise ValueError("the key needs a password")


def _signature(path: Path) -> Signature:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
