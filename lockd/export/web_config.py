"""The web configuration in force: TLS, extra headers, users with passwords.

The format of the file is that of Prometheus' exporter-toolkit. The file and the certificates that it names
are read again when they have changed. If the new file is invalid, its errors are logged and the previous
configuration stays in force. A new file without a protection that is in force (TLS, client certificates,
users) is invalid as well, because a file that is only half written looks the same. Only a restart of lockd
removes a protection.
"""

from __future__ import annotations

import io
import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from lockd.errors import ConfigError

log = logging.getLogger(__name__)

Signature = tuple[int, int, int] | None
"""Time in ns of the last change of content, owner or mode; size; inode. None if there is no such file."""


@dataclass(frozen=True)
class Settings:
    """The contents of the web configuration file. The defaults are in force without a file."""

    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    """Bcrypt hashes by user name. If there are none, requests need no password."""
    tls: ssl.SSLContext | None = None
    client_names: frozenset[str] = frozenset()
    """If there are any, a client's certificate must have one of them as subject alternative name."""

    def protections(self) -> set[str]:
        """The keys in force that restrict who can read from the exporter, by their dotted names."""
        in_force = {
            "basic_auth_users": bool(self.users),
            "tls_server_config": self.tls is not None,
            "tls_server_config.client_auth_type": bool(
                self.tls and self.tls.verify_mode == ssl.CERT_REQUIRED
            ),
            "tls_server_config.client_allowed_sans": bool(self.client_names),
        }
        return {key for key, is_in_force in in_force.items() if is_in_force}


class WebConfig:
    """Reads the web configuration at `path`, and reads it again when it has changed.

    Without a path, the defaults of Settings are in force. The file `stored` has the names of the protections
    in force (TLS, client certificates, users), and an exporter that replaces this one reads them there. The
    constructor raises ConfigError if the configuration is invalid, or if it lacks one of these protections.
    """

    def __init__(self, path: Path | None, stored: BinaryIO | None = None) -> None:
        self._path = path
        self._stored = stored or io.BytesIO()
        self._signatures: dict[Path, Signature] = {}
        self._settings = Settings() if path is None else self._read(path)

    def current(self) -> Settings:
        """The settings in force, after the file is read again if it has changed.

        The check is cheap enough for every request and connection.
        """
        if any(_signature(path) != signature for path, signature in self._signatures.items()):
            self.read_again("it or a file that it names has changed")
        return self._settings

    def read_again(self, why: str) -> bool:
        """Read the file, if there is one. Returns False if it is invalid, and logs its errors.

        `why` is the reason that the log gives.
        """
        if self._path:
            try:
                self._settings = self._read(self._path)
            except ConfigError as error:
                log.error("the previous web configuration stays in use: %s", error)
                return False
            log.info("%s: read again, because %s", self._path, why)
        return True

    def _read(self, path: Path) -> Settings:
        # Not at the top: an exporter without such a file needs neither yaml nor this module, which take 1 MB.
        from lockd.export import web_config_file

        # The signatures are taken before the files are read, so that no change is missed.
        self._signatures = {path: _signature(path)}
        file = web_config_file.read_web_file(path)
        certificates = web_config_file.certificate_files(path, file)
        self._signatures |= {path: _signature(path) for path in certificates.values()}
        tls = file.tls_server_config
        settings = Settings(
            headers=dict(file.http_server_config.headers),
            users=dict(file.basic_auth_users),
            tls=web_config_file.tls_context(path, tls, certificates) if certificates else None,
            client_names=frozenset(tls.client_allowed_sans),
        )
        self._check_protections(path, settings.protections())
        return settings

    def _check_protections(self, path: Path, protections: set[str]) -> None:
        """Store the protections. Raises ConfigError if one is missing that is in force."""
        self._stored.seek(0)
        lost = set(self._stored.read().decode().split()) - protections
        if "tls_server_config" in lost:  # the message need not name the keys below it
            lost = {key for key in lost if not key.startswith("tls_server_config.")}
        if lost:
            raise ConfigError(
                f"{path}: it no longer has {', '.join(sorted(lost))}; rule: only a restart of lockd removes"
                " a protection, because a file that is only half written looks the same"
            )
        self._stored.seek(0)  # no truncate(): the names only become more, so the text never gets shorter
        self._stored.write(" ".join(sorted(protections)).encode())


def _signature(path: Path) -> Signature:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ctime_ns, status.st_size, status.st_ino
