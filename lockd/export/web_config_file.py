"""What one reading of the web configuration file gives, and OpenSSL makes of it."""

from __future__ import annotations

import errno
import os
import pwd
import ssl
import stat
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from lockd.config.reader import read_file
from lockd.errors import ConfigError
from lockd.export.web_config_keys import (
    AEAD_CIPHERS,
    CIPHERS,
    CLIENTS,
    CURVES,
    OLDER_CIPHERS,
    VERSIONS,
    TlsServer,
    WebFile,
)


def read(path: Path) -> WebFile:
    """Raises ConfigError if it is wrong, or asks for what this host does not have."""
    _open(path, f"{path}: cannot read this configuration")
    file = read_file(WebFile, path, may_be_empty=False)
    if file.basic_auth_users and find_spec("bcrypt") is None:
        raise ConfigError(
            f"{path}: basic_auth_users: Python's bcrypt is not installed;"
            " rule: passwords need it (Debian and Ubuntu: python3-bcrypt)"
        )
    return file


def named_files(path: Path, file: WebFile) -> dict[str, Path]:
    """Those of the certificates, by key; relative ones are beside the file itself."""
    tls = file.tls_server_config
    return {
        key: path.parent / name
        for key, name in (
            ("cert_file", tls.cert_file),
            ("key_file", tls.key_file),
            ("client_ca_file", tls.client_ca_file),
        )
        if name
    }


def context(config: Path, tls: TlsServer, files: Mapping[str, Path]) -> ssl.SSLContext:
    """Raises ConfigError that says which of the files cannot be used."""
    for key, path in files.items():
        _open(path, f"{config}: tls_server_config.{key}: cannot read {path}")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = VERSIONS[tls.min_version]
    made.maximum_version = VERSIONS[tls.max_version]
    if tls.prefer_server_cipher_suites:
        made.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    try:
        made.load_cert_chain(files["cert_file"], files["key_file"], password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{config}: tls_server_config: cannot use {files['cert_file']} with"
            f" {files['key_file']}: {error}; rule: a certificate chain and its key, without a"
            " password, in PEM"
        ) from None
    try:
        if "client_ca_file" in files:
            made.load_verify_locations(files["client_ca_file"])
        made.verify_mode = CLIENTS[tls.client_auth_type]
        made.set_ciphers(_ciphers(tls))
        for name in tls.curve_preferences:
            made.set_ecdh_curve(CURVES[name])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{config}: tls_server_config: OpenSSL refuses it: {error};"
            " rule: client_ca_file is in PEM, and the ciphers and curves are ones that it has"
        ) from None
    return made


def _ciphers(tls: TlsServer) -> str:
    if tls.cipher_suites:
        return ":".join(CIPHERS[name] for name in tls.cipher_suites)
    has_aead = VERSIONS[tls.min_version] >= ssl.TLSVersion.TLSv1_2
    return AEAD_CIPHERS if has_aead else f"{AEAD_CIPHERS}:{OLDER_CIPHERS}"


def _no_password() -> str:
    # Without this, OpenSSL would ask for one on the terminal.
    raise ValueError("the key needs a password")


def _open(path: Path, what: str) -> None:
    """Raises ConfigError that begins with `what` if this user cannot."""
    try:
        # Without waiting for whoever writes into a pipe, as OpenSSL would.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
        finally:
            os.close(file)
    except PermissionError as error:
        user = _user()
        rule = f"chown {user} {path} && chmod 0400 {path}, and let {user} into the directories above"
        if user == "nobody":  # which other services may be as well
            rule = (
                "never open it to nobody, but make a user lockd, as `make install` does, or `useradd --system"
                f" --no-create-home --shell /usr/sbin/nologin lockd`; then {rule.replace(user, 'lockd')}"
            )
        raise ConfigError(f"{what} as user {user}: {error.strerror}; rule: {rule}") from None
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from None


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
