"""The web configuration file: the rules of its keys, how it is read, and the TLS context made from it.

Only an exporter with such a file imports this module: yaml takes 1 MB of memory.
"""

from __future__ import annotations

import difflib
import errno
import os
import pwd
import re
import ssl
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml

from lockd.config.reader import key as setting
from lockd.config.reader import read_file, section
from lockd.config.rules import NULL, STR, Broken, Fault, Rule, boolean, choice, list_of, scalar
from lockd.errors import ConfigError

VERSIONS = {
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_CLIENTS_OF_GO = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
"""Go's policies that accept clients' certificates without verification. Python's ssl has no such mode."""
CURVES = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}
CIPHERS = {  # Go's names and OpenSSL's names; the ciphers of TLS 1.3 cannot be chosen
    f"TLS_ECDHE_{auth}_WITH_{name}": f"ECDHE-{auth}-{openssl}"
    for auth in ("ECDSA", "RSA")
    for name, openssl in (
        ("AES_128_CBC_SHA", "AES128-SHA"),
        ("AES_256_CBC_SHA", "AES256-SHA"),
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
    )
}
_HEADERS: dict[str, tuple[str, ...]] = {  # the values that each header can have; () for any value
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
AEAD_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""The default ciphers for TLS 1.2: with forward secrecy, and without CBC."""
MOST_COST = 14
"""The highest cost of a bcrypt hash. A check then takes a second of CPU time, and each step doubles it."""
_BCRYPT = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")

Pairs = tuple[tuple[str, str], ...]


def _file() -> Rule[str]:
    def parse(text: str) -> str:
        if not text.isprintable():  # open() raises ValueError for some texts, as for NUL
            raise ValueError(text)
        return text

    return scalar("a file name that can be printed", {STR}, parse)


def _unsupported(instead: str) -> Rule[None]:
    """The rule of a key that the format has, but lockd does not support. `instead` ends the error message."""

    def read(node: yaml.Node) -> None:
        if node.tag != NULL:
            raise Broken(Fault(node, f"cannot be given to lockd: {instead}"))

    return Rule(instead, read)


def _pairs(wants: str, check: Callable[[yaml.Node, yaml.Node], Iterator[Fault]]) -> Rule[Pairs]:
    """The rule of a mapping of text to text. `check` returns the faults of a pair."""

    def read(node: yaml.Node) -> Pairs:
        if not isinstance(node, yaml.MappingNode):
            raise Broken(Fault(node, f"is not {wants}"))
        faults = [fault for name, value in node.value for fault in check(name, value)]
        names = [name.value for name, _ in node.value]
        faults += [
            Fault(name, "is given twice")
            for position, (name, _) in enumerate(node.value)
            if name.value in names[:position]
        ]
        if faults:
            raise Broken(*faults)
        return tuple((name.value, value.value) for name, value in node.value)

    return Rule(wants, read)


def _header_faults(name: yaml.Node, value: yaml.Node) -> Iterator[Fault]:
    values = _HEADERS.get(name.value) if isinstance(name, yaml.ScalarNode) else None
    if values is None:
        near = difflib.get_close_matches(str(name.value), _HEADERS, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else f": {', '.join(_HEADERS)}"
        yield Fault(name, f"is not one of the headers that can be set{hint}")
    elif not isinstance(value, yaml.ScalarNode) or not value.value.isprintable():
        yield Fault(value, "is not one line of text", f".{name.value}")
    elif values and value.value not in values:
        yield Fault(value, f"is not {' or '.join(values)}", f".{name.value}")


def _user_faults(name: yaml.Node, password: yaml.Node) -> Iterator[Fault]:
    # The fault is shown at the name, because the value may be a password in clear text.
    if not isinstance(name, yaml.ScalarNode) or not name.value or ":" in name.value:
        yield Fault(name, "is not a user name: text without a colon")
    elif not isinstance(password, yaml.ScalarNode) or not _BCRYPT.fullmatch(password.value):
        yield Fault(name, "has no bcrypt hash of a password, such as `htpasswd -nB` prints: $2y$…")
    elif int(password.value[4:6]) > MOST_COST:
        yield Fault(
            name,
            f"has a bcrypt hash of cost {password.value[4:6]}, so each check of a password would take"
            f" {2 ** (int(password.value[4:6]) - MOST_COST)} s or so; rule: at most {MOST_COST}, such as"
            " `htpasswd -nB -C 12` makes",
        )


@dataclass(frozen=True)
class TlsServer:
    """TLS. With a certificate, lockd serves HTTPS instead of HTTP.

    File names are relative to the directory of the web configuration file.
    """

    cert_file: str = setting(_file(), '""', "Certificate chain in PEM.")
    key_file: str = setting(_file(), '""', "Its private key in PEM, without a password.")
    client_auth_type: str = setting(
        choice(*CLIENTS, not_yet=_CLIENTS_OF_GO), "NoClientCert", "Policy for clients."
    )
    client_ca_file: str = setting(
        _file(), '""', "Certificates of the authorities that sign clients' certificates, in PEM."
    )
    client_allowed_sans: tuple[str, ...] = setting(
        list_of(scalar("a name", {STR}, str), "a list of names"),
        "[]",
        "Clients need a certificate with one of these alternative names.",
    )
    min_version: str = setting(choice(*VERSIONS), "TLS12", "Lowest version of TLS.")
    max_version: str = setting(choice(*VERSIONS), "TLS13", "Highest version of TLS.")
    cipher_suites: tuple[str, ...] = setting(
        list_of(choice(*CIPHERS), "a list of cipher suites"),
        "[]",
        "Ciphers for TLS 1.2; if none, ECDHE with AES-GCM or ChaCha20.",
    )
    prefer_server_cipher_suites: bool = setting(
        boolean(), "true", "Whether the server's order of ciphers counts, not the client's."
    )
    curve_preferences: tuple[str, ...] = setting(
        list_of(choice(*CURVES), "a list of at most one curve", lambda names: len(names) < 2),
        "[]",
        "The curve for the key exchange; OpenSSL's if none.",
    )
    cert: None = setting(_unsupported("use cert_file"), "null", "")
    key: None = setting(_unsupported("use key_file"), "null", "")
    client_ca: None = setting(_unsupported("use client_ca_file"), "null", "")

    def conflicts(self) -> Iterator[tuple[str, str]]:
        verifies = self.client_auth_type != "NoClientCert"
        if bool(self.cert_file) != bool(self.key_file):
            yield "", "has one of cert_file and key_file; TLS needs both"
        if not self.cert_file and (verifies or self.client_ca_file):
            yield "", "asks clients for certificates and has no cert_file and key_file of its own"
        if self.cert_file and verifies and not self.client_ca_file:
            yield "client_auth_type", "needs a client_ca_file to verify with"
        if self.cert_file and self.client_ca_file and not verifies:
            yield "client_ca_file", "needs a client_auth_type other than NoClientCert"
        if self.client_allowed_sans and self.client_auth_type != "RequireAndVerifyClientCert":
            yield "client_allowed_sans", "needs client_auth_type: RequireAndVerifyClientCert"
        if VERSIONS[self.min_version] > VERSIONS[self.max_version]:
            yield "min_version", f"is above max_version, {self.max_version}"


@dataclass(frozen=True)
class HttpServer:
    """HTTP."""

    http2: bool = setting(boolean(), "true", "Allowed, but lockd speaks HTTP/1.1.")
    headers: Pairs = setting(
        _pairs("a mapping of headers to values", _header_faults), "{}", "Sent with every answer."
    )


@dataclass(frozen=True)
class WebFile:
    """The keys at the top of the file."""

    tls_server_config: TlsServer = section(TlsServer)
    http_server_config: HttpServer = section(HttpServer)
    basic_auth_users: Pairs = setting(
        _pairs("a mapping of user names to bcrypt hashes", _user_faults),
        "{}",
        "Users who may read, with bcrypt hashes of their passwords; if none, everybody may.",
    )
    rate_limit: None = setting(
        _unsupported("it limits connections, and all scrapers share one snapshot"), "null", ""
    )


def read_web_file(path: Path) -> WebFile:
    """The contents of the file. Raises ConfigError if it is invalid, or if bcrypt is needed but missing."""
    _check_readable(path, f"{path}: cannot read this configuration")
    file = read_file(WebFile, path, may_be_empty=False)
    if file.basic_auth_users and find_spec("bcrypt") is None:
        raise ConfigError(
            f"{path}: basic_auth_users: Python's bcrypt is not installed;"
            " rule: passwords need it (Debian and Ubuntu: python3-bcrypt)"
        )
    return file


def certificate_files(path: Path, file: WebFile) -> dict[str, Path]:
    """The files of certificates and keys that the file at `path` names, by key."""
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


def tls_context(config: Path, tls: TlsServer, files: Mapping[str, Path]) -> ssl.SSLContext:
    """The TLS context for the section `tls` of the file `config`.

    `files` is the result of certificate_files(). Raises ConfigError that names a file that cannot be used.
    """
    for key, path in files.items():
        _check_readable(path, f"{config}: tls_server_config.{key}: cannot read {path}")
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
        context.set_ciphers(_ciphers(tls))
        for name in tls.curve_preferences:
            context.set_ecdh_curve(CURVES[name])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{config}: tls_server_config: OpenSSL refuses it: {error};"
            " rule: client_ca_file is in PEM, and the ciphers and curves are ones that it has"
        ) from None
    return context


def _ciphers(tls: TlsServer) -> str:
    return ":".join(CIPHERS[name] for name in tls.cipher_suites) or AEAD_CIPHERS


def _no_password() -> str:
    # Without this function, OpenSSL would ask for a password on the terminal.
    raise ValueError("the key needs a password")


def _check_readable(path: Path, message: str) -> None:
    """Raise a ConfigError that begins with `message` if this user cannot read `path`, or if it is no regular
    file."""
    try:
        # O_NONBLOCK: without it, open() of a named pipe would wait for a writer, as it would in OpenSSL.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
        finally:
            os.close(file)
    except PermissionError as error:
        user = _user_name()
        rule = f"chown {user} {path} && chmod 0400 {path}, and let {user} into the directories above"
        if user == "nobody":  # then other services that run as nobody could read the file
            rule = (
                "do not give the user nobody access, but make a user lockd, by `make install` or by"
                " `useradd --system --no-create-home --shell /usr/sbin/nologin lockd`; then"
                f" {rule.replace(user, 'lockd')}"
            )
        raise ConfigError(f"{message} as user {user}: {error.strerror}; rule: {rule}") from None
    except OSError as error:
        raise ConfigError(f"{message}: {error.strerror}") from None


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
