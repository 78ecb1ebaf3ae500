"""The grammar of the web configuration file: every key, its default and its rule."""

from __future__ import annotations

import difflib
import re
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import yaml

from lockd.config.reader import key as setting
from lockd.config.reader import section
from lockd.config.rules import NULL, STR, Broken, Fault, Rule, boolean, choice, list_of, scalar

VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_CLIENTS_OF_GO = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
"""Policies that take a certificate without verifying it; Python's ssl has no such thing."""
CURVES = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}
CIPHERS = {  # OpenSSL's names; TLS 1.3 has its own, which nobody chooses
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
_HEADERS: dict[str, tuple[str, ...]] = {  # with the values a header can have, if not any
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
AEAD_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""What is taken for TLS 1.2 unless others are asked for: keys that are forgotten, and no CBC."""
OLDER_CIPHERS = "ECDHE+AES"
"""Besides, if TLS 1.0 or 1.1 is asked for, which have no others."""
MOST_COST = 14
"""Of a bcrypt hash: such a check takes a second of CPU time, and each step more doubles that."""
_BCRYPT = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")

Pairs = tuple[tuple[str, str], ...]


def _file() -> Rule[str]:
    return scalar("a file name", {STR}, str)


def _without(instead: str) -> Rule[None]:
    """A key of the format that lockd does not have."""

    def read(node: yaml.Node) -> None:
        if node.tag != NULL:
            raise Broken(Fault(node, f"cannot be given to lockd: {instead}"))

    return Rule(instead, read)


def _pairs(wants: str, check: Callable[[yaml.Node, yaml.Node], Iterator[Fault]]) -> Rule[Pairs]:
    """A mapping of text to text, where `check` says what is wrong with a pair."""

    def read(node: yaml.Node) -> Pairs:
        if not isinstance(node, yaml.MappingNode):
            raise Broken(Fault(node, f"is not {wants}"))
        faults = [fault for name, value in node.value for fault in check(name, value)]
        names = [name.value for name, _ in node.value]
        faults += [
            Fault(name, "is given twice")
            for at, (name, _) in enumerate(node.value)
            if name.value in names[:at]
        ]
        if faults:
            raise Broken(*faults)
        return tuple((name.value, value.value) for name, value in node.value)

    return Rule(wants, read)


def _header(name: yaml.Node, value: yaml.Node) -> Iterator[Fault]:
    values = _HEADERS.get(name.value) if isinstance(name, yaml.ScalarNode) else None
    if values is None:
        near = difflib.get_close_matches(str(name.value), _HEADERS, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else f": {', '.join(_HEADERS)}"
        yield Fault(name, f"is not one of the headers that can be set{hint}")
    elif not isinstance(value, yaml.ScalarNode) or not value.value.isprintable():
        yield Fault(value, "is not one line of text", f".{name.value}")
    elif values and value.value not in values:
        yield Fault(value, f"is not {' or '.join(values)}", f".{name.value}")


def _user(name: yaml.Node, password: yaml.Node) -> Iterator[Fault]:
    # The fault is shown at the name: the password may stand there in clear.
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
    """HTTPS instead of HTTP, once there is a certificate. File names are relative to this file."""

    cert_file: str = setting(_file(), '""', "Certificate chain in PEM.")
    key_file: str = setting(_file(), '""', "Its private key in PEM, without a password.")
    client_auth_type: str = setting(
        choice(*CLIENTS, not_yet=_CLIENTS_OF_GO), "NoClientCert", "Policy for clients."
    )
    client_ca_file: str = setting(_file(), '""', "Who signs clients' certificates, in PEM.")
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
        "For TLS 1.2; if none, ECDHE with AES-GCM or ChaCha20.",
    )
    prefer_server_cipher_suites: bool = setting(boolean(), "true", "Whose order of ciphers counts.")
    curve_preferences: tuple[str, ...] = setting(
        list_of(choice(*CURVES), "a list of at most one curve", lambda names: len(names) < 2),
        "[]",
        "The curve for the key exchange; OpenSSL's if none.",
    )
    cert: None = setting(_without("use cert_file"), "null", "")
    key: None = setting(_without("use key_file"), "null", "")
    client_ca: None = setting(_without("use client_ca_file"), "null", "")

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
    """What is said about HTTP."""

    http2: bool = setting(boolean(), "true", "Allowed, but lockd speaks HTTP/1.1.")
    headers: Pairs = setting(
        _pairs("a mapping of headers to values", _header), "{}", "Sent with every answer."
    )


@dataclass(frozen=True)
class WebFile:
    """The whole file."""

    tls_server_config: TlsServer = section(TlsServer)
    http_server_config: HttpServer = section(HttpServer)
    basic_auth_users: Pairs = setting(
        _pairs("a mapping of user names to bcrypt hashes", _user), "{}", "Who may ask."
    )
    rate_limit: None = setting(
        _without("it limits connections, and all scrapers share one snapshot"), "null", ""
    )
