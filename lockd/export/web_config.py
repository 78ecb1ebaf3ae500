"""The web configuration file of Prometheus exporters: TLS, extra headers, users with passwords.

The format is that of Prometheus' exporter-toolkit. The file and the certificates that it names
are read again once they have changed; what is wrong then is logged, and what was before stays.
So does what keeps people out, though the file no longer asks for it: half a file, as there is
while it is being written, looks like that. Only a restart of lockd takes it away.
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


@dataclass(frozen=True)
class Settings:
    """What one reading of the file says; the defaults are those without a file."""

    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    """Bcrypt hashes by user name; if there are none, anybody may ask."""
    tls: ssl.SSLContext | None = None
    client_names: frozenset[str] = frozenset()
    """If there are any, a client's certificate must have one of them as alternative name."""

    def protections(self) -> set[str]:
        """What there is that keeps people out, by its keys in the file."""
        there = {
            "basic_auth_users": bool(self.users),
            "tls_server_config": self.tls is not None,
            "tls_server_config.client_auth_type": bool(
                self.tls and self.tls.verify_mode == ssl.CERT_REQUIRED
            ),
            "tls_server_config.client_allowed_sans": bool(self.client_names),
        }
        return {key for key, is_there in there.items() if is_there}


class WebConfig:
    """The file at `path`; raises ConfigError if it is wrong at the start.

    In the file `kept` it says what keeps people out, which an exporter that takes its place finds there.
    """

    def __init__(self, path: Path | None, kept: BinaryIO | None = None) -> None:
        self._path = path
        self._kept = kept or io.BytesIO()
        self._seen: dict[Path, Signature] = {}
        self._settings = Settings() if path is None else self._read(path)

    def current(self) -> Settings:
        """What the file says now. Cheap enough to be called for every request and connection."""
        if any(_signature(path) != was for path, was in self._seen.items()):
            self.read_again("it or a file that it names has changed")
        return self._settings

    def read_again(self, why: str) -> bool:
        """Whether there is nothing wrong with it; else what is wrong is logged."""
        if self._path:
            try:
                self._settings = self._read(self._path)
            except ConfigError as error:
                log.error("the web configuration before this one stays in use: %s", error)
                return False
            log.info("%s: read again, because %s", self._path, why)
        return True

    def _read(self, path: Path) -> Settings:
        # Without a file neither YAML nor the rules for its keys are needed: 1 MB.
        from lockd.export import web_config_file

        # What the files look like is noted before they are read, so no change is missed.
        self._seen = {path: _signature(path)}
        file = web_config_file.read(path)
        named = web_config_file.named_files(path, file)
        self._seen |= {path: _signature(path) for path in named.values()}
        found = Settings(
            headers=dict(file.http_server_config.headers),
            users=dict(file.basic_auth_users),
            tls=web_config_file.context(path, file.tls_server_config, named) if named else None,
            client_names=frozenset(file.tls_server_config.client_allowed_sans),
        )
        self._refuse_less(path, found.protections())
        return found

    def _refuse_less(self, path: Path, now: set[str]) -> None:
        self._kept.seek(0)
        lost = set(self._kept.read().decode().split()) - now
        if "tls_server_config" in lost:  # then all of its keys are
            lost = {key for key in lost if not key.startswith("tls_server_config.")}
        if lost:
            raise ConfigError(
                f"{path}: it no longer has {', '.join(sorted(lost))}; rule: what keeps people out stays until"
                " a restart of lockd, as half a file may look like this"
            )
        self._kept.seek(0)  # there may be more, never less
        self._kept.write(" ".join(sorted(now)).encode())


def _signature(path: Path) -> Signature:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
