"""Harnesses for HTTP as anybody may send it, the web configuration, and the answers to `lockd top`."""

from __future__ import annotations

import array
import asyncio
import functools
import io
import json
import logging
import math
import os
import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import bcrypt
from rich.console import Console

from lockd.errors import ConfigError, LockdError
from lockd.export import web_config_file  # noqa: F401  # imported later, it would not guide atheris
from lockd.export.handlers import Service
from lockd.export.link import Answer
from lockd.export.server import Server
from lockd.export.web_config import Settings, WebConfig
from lockd.messages import REQUEST_DETAIL, REQUEST_METRICS, REQUEST_WAITS, pack
from lockd.views.rates import Client
from lockd.views.top import KINDS, Options, Watch
from tests.fuzz.clock import Loop
from tests.fuzz.harness import Harness, check_words, json_mutation, mutated_lines, text_mutation
from tests.support.exporter_process import full_block, waits_block

STATUSES = {100, 200, 400, 401, 403, 404, 405, 413, 429, 431, 503}
HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
_STATUS = re.compile(rb"^HTTP/1\.1 (\d{3}) [^\r\n]*\r\n", re.M)


HOLDERS = [{"site": "</svg>", "seconds": 1.5, "share": 1.0, "samples": 3, "stack": ["unlock", "</svg>"]}]


def detail_block() -> bytes:
    """Return a block of the tables behind /api/v1 and the profiles: two rows each, with markup as a name."""
    text = {
        "program": ["futex", "kernel_locks"], "unit": ["a.service", "b"], "comm": ["shop", "</svg><script>"],
        "kind": ["lock", "mutex"], "lock": ["shop:stock", ""], "site": ["shop:sell", ""],
        "address": ["0x10", "0x20"],
    }  # fmt: skip
    threads = {**text, "thread_comm": ["one", "two"]}
    tables = {
        name: {
            "is_cut": False,
            "text": threads if name == "threads" else text,
            "numbers": ["tgid", "tid", "blocked_us", "waiting_us", "blocked_count"],
            "lists": {"stack": [["sell", "main"], []], "holders": [HOLDERS, []]},
        }
        for name in ("locks", "threads", "deadlocks")
    }
    arrays = {
        f"{name}.{column}": array.array("d" if column.endswith("_us") else "q", [1, 2])
        for name, table in tables.items()
        for column in table["numbers"]
    }
    arrays["locks.key"] = array.array("q", [1, 2])
    arrays["locks.since"] = array.array("d", [1.5, 1.5])
    return pack({"tables": tables, "time": 1700000000.25, "monotonic": 500.0}, arrays)


class _Link:
    """Stands for the sampler: it always answers the same blocks."""

    def __init__(self) -> None:
        blocks = {
            REQUEST_METRICS: full_block(1), REQUEST_DETAIL: detail_block(), REQUEST_WAITS: waits_block()
        }  # fmt: skip
        self._answers = {request: Answer(memoryview(block)) for request, block in blocks.items()}

    async def ask(self, request: bytes) -> Answer:
        return self._answers[request]

    async def wait_until_settled(self) -> None:
        """Return at once."""


class _Web(WebConfig):
    def __init__(self, users: dict[str, str]) -> None:
        super().__init__(None)
        self._settings = Settings(users=users)


class _Errors(logging.Handler):
    """Keeps what is logged. A request must not make a line in the journal: many requests would fill it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


class _Exporter:
    """An exporter in this process and thread, with a server that has users and one that has none."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.errors = _Errors()
        logging.getLogger().addHandler(self.errors)
        self.listening = socket.create_server(("127.0.0.1", 0))
        with_users = {"prometheus": HASH, "admin": HASH}
        self.servers = (
            self.loop.run_until_complete(self._start({})),
            self.loop.run_until_complete(self._start(with_users)),
        )

    async def _start(self, users: dict[str, str]) -> Server:
        link: Any = _Link()
        return Server(Service(link, _Web(users), math.inf))

    def ask(self, server: Server, request: bytes) -> bytes:
        """Send a request. Return all that comes back until the connection is closed."""
        with socket.create_connection(self.listening.getsockname()) as client:
            # The end resets the connection. Otherwise it would take a port for a minute.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection, address = self.listening.accept()
            connection.setblocking(False)
            client.setblocking(False)
            client.send(request)
            client.shutdown(socket.SHUT_WR)
            return self.loop.run_until_complete(self._answer(server, client, connection, address))

    async def _answer(
        self, server: Server, client: socket.socket, connection: socket.socket, address: Any
    ) -> bytes:
        server._accept(connection, address)
        answer = b""
        for _ in range(100):
            await asyncio.sleep(1.0)
            try:
                part = client.recv(1 << 20)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                break
            answer += part
            if not part:
                break
        else:
            raise AssertionError("the connection is open after 100 s")
        await asyncio.sleep(100)  # until everything that the server still does has ended
        return answer


@functools.cache
def _exporter() -> _Exporter:
    return _Exporter()


def http(data: bytes) -> None:
    """Whatever is asked, the answer has a status that is not 500, and nothing is logged. An input that begins
    with `u` is sent to an exporter with users."""
    exporter = _exporter()
    exporter.errors.said.clear()
    has_users = data[:1] == b"u"
    answer = exporter.ask(exporter.servers[has_users], data[1:])
    exporter.loop.check()
    assert not exporter.errors.said, exporter.errors.said[0]
    statuses = [int(status) for status in _STATUS.findall(answer)]
    assert set(statuses) <= STATUSES, statuses
    if has_users and b"cHJvbWV0aGV1czpzZWNyZXQ=" not in data and b"YWRtaW46c2VjcmV0" not in data:
        assert 200 not in statuses, "without a password"


def http_requests() -> list[bytes]:
    end = b" HTTP/1.1\r\nHost: localhost\r\n"
    paths = (
        b"/", b"/metrics", b"/-/healthy", b"/-/ready", b"/-/settled", b"/debug/pprof/futex?seconds=3",
        b"/flamegraph?program=offcpu&unit=a", b"/api/v1/locks?limit=3&kind=lock", b"/api/v1/deadlocks",
        b"/nothing",
        b"/api/v1/threads?comm=%ff&limit=0", b"/flamegraph?program=kernel_locks&seconds=1",
        b"/flamegraph?program=futex&by=holder", b"/flamegraph?program=offcpu&by=waker&seconds=1",
        b"/debug/pprof/wakers?kind=disk",
    )  # fmt: skip
    simple = [b"o" + b"GET " + path + end + b"\r\n" for path in paths]
    right = b"Authorization: Basic cHJvbWV0aGV1czpzZWNyZXQ=\r\n"
    others = [
        b"u" + b"GET /metrics" + end + right + b"Accept-Encoding: gzip;q=0, br\r\n\r\n",
        b"u" + b"GET /metrics" + end + b"Authorization: Basic YWRtaW46d3Jvbmc=\r\n\r\n" * 2,
        b"u"
        + b"GET /metrics HTTP/1.0\r\n"
        + right
        + b"Accept: application/openmetrics-text; version=1.0.0\r\n\r\n",
        b"o" + b"POST /metrics" + end + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n0\r\n\r\n",
        b"o" + b"BREW /metrics" + end + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"o" + b"GET /metrics" + end + b"Content-Length: 10\r\nConnection: keep-alive\r\n\r\n0123456789",
        b"o" + b"GET /-/healthy" + end + b"\r\nGET /-/ready" + end + b"\r\nHEAD /metrics" + end + b"\r\n",
        b"o"
        + b"GET http://evil.example/metrics"
        + end
        + b"Expect: 100-continue\r\nUpgrade: websocket\r\n\r\n",
        b"o" + b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n folded: x\r\n\r\n",
    ]
    return simple + others


HTTP_WORDS = (
    b"GET ", b"HEAD ", b"POST ", b"OPTIONS ", b"CONNECT ", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n",
    b" HTTP/2\r\n", b"\r\n",
    b"\r\n\r\n", b"\n", b"\r", b"\0", b"\xff", b"Host: ", b"Host: [::1]:9776\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"Authorization: Basic ", b"Accept: ", b"Accept-Encoding: gzip\r\n", b"X-Forwarded-For: 1.2.3.4\r\n",
    b"%00", b"%ff",
    b"?", b"&", b"=", b"limit=", b"seconds=", b"unit=", b"comm=", b"kind=", b"program=futex", b"by=holder",
    b"by=waker",
    b"/api/v1/locks",
    b"/metrics", b"/debug/pprof/", b"..", b"//", b";", b"q=0", b"\xc3\xa9", b"\xed\xa0\x80",
    b"5\r\nhello\r\n0\r\n\r\n",
)  # fmt: skip


@functools.cache
def _directory() -> Path:
    """Return a directory with a pipe and, if there is openssl, a certificate and its key."""
    directory = Path(tempfile.mkdtemp(prefix="lockd-fuzz-"))
    os.mkfifo(directory / "pipe")
    if shutil.which("openssl"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "9", "-subj", "/CN=localhost", "-keyout", directory / "key.pem", "-out",
             directory / "cert.pem"],
            check=True, capture_output=True,
        )  # fmt: skip
    return directory


def web_config(data: bytes) -> None:
    """All that is wrong with a web configuration is one error. While lockd runs, whatever the file becomes,
    no protection is lost."""
    path = _directory() / "web.yml"
    path.write_bytes(web_configurations()[0])
    web = WebConfig(path)
    before = web.current().protections()
    assert before
    new = _directory() / "new.yml"
    new.write_bytes(data)
    os.replace(new, path)
    assert before <= web.current().protections()
    try:
        fresh = WebConfig(path).current()
    except ConfigError as error:
        check_words(str(error))
        return
    assert all("\n" not in value and "\r" not in value for value in fresh.headers.values())
    assert all(name and ":" not in name for name in fresh.users)


def web_configurations() -> list[bytes]:
    users = f'basic_auth_users:\n  prometheus: {HASH}\n  "o\'x": {HASH}\n'
    tls = "tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\n"
    more = (
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: cert.pem\n"
        "  client_allowed_sans: [a.example]\n  min_version: TLS12\n  max_version: TLS12\n"
        "  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA]\n  curve_preferences: [CurveP384]\n"
    )
    headers = (
        "http_server_config:\n  http2: false\n  headers: {X-Frame-Options: deny, X-XSS-Protection: '1'}\n"
    )
    first = (tls if (_directory() / "key.pem").exists() else "") + users
    return [
        one.encode()
        for one in (first, users, tls + more + headers, tls, headers, "{}", "", "rate_limit: {}\n")
    ]


WEB_WORDS = (
    b"tls_server_config:", b"basic_auth_users:", b"http_server_config:", b"headers:", b"cert_file: ",
    b"key_file: ",
    b"cert.pem", b"key.pem", b"web.yml", b"pipe", b"/dev/zero", b"client_auth_type: ",
    b"VerifyClientCertIfGiven", b"NoClientCert",
    b"TLS13", b"TLS12", b"cipher_suites: []", b"[", b"]", b"{", b"}", b": ", b"- ", b"null", b"$2y$10$",
    b"\xff",
    b"&a ", b"*a", b"'", b'"', b'"\\e"', b"Strict-Transport-Security: ",
)  # fmt: skip


class _Daemon(Client):
    """Stands for a daemon that answers over HTTP."""

    def __init__(self, answers: list[bytes]) -> None:
        super().__init__("http://127.0.0.1:9776")
        self._answers = answers

    def _get(self, path: str) -> bytes:
        return self._answers[0]


def top(data: bytes) -> None:
    """`lockd top` shows two answers of a daemon, or one error, without any control characters of theirs."""
    options = Options(
        "http://127.0.0.1:9776",
        1,
        True,
        ("blocked", "held")[len(data) & 1],
        ("lock", "holder", "bottleneck")[len(data) % 3],
        frozenset(KINDS),
        5,
        False,
    )
    watch, answers = Watch(options), data.split(b"\n")
    watch._client = _Daemon(answers)
    shown = io.StringIO()
    try:
        while answers:
            watch.read_tables()
            del answers[0]
        Console(file=shown, width=200, markup=False).print(watch.view(5, 200))
    except LockdError as error:
        check_words(str(error))
    check_words(shown.getvalue())


def tables_of_daemons() -> list[bytes]:
    both = {
        "program": "futex", "kind": "lock", "unit": "a.service", "comm": "shop", "tgid": 7, "tid": 8,
        "lock": "shop:stock",
        "address": "0x10", "site": "shop:sell", "thread_comm": "worker", "advice": "java", "holder": "worker",
        "holder_tid": 9, "waiting": 1, "threads": 3, "waiting_us": 40, "waiting_is_least": True, "held_us": 5,
        "acquisitions": 6, "max_held_us": 3, "holding_us": 2, "holders": HOLDERS,
    }  # fmt: skip
    looks = []
    for time, blocked in ((1.0, 10), (2.0, 900)):
        row = {**both, "blocked_us": blocked, "max_blocked_us": blocked, "blocked_count": blocked}
        clocks = {"time": time, "monotonic": time}
        looks.append(json.dumps({**clocks, "locks": [row, {**row, "tgid": 0}], "threads": [row]}).encode())
    return [b"\n".join(looks), looks[0]]


HARNESSES = (
    Harness("top", top, tables_of_daemons, mutated_lines(json_mutation()), longest=8192, seconds=2.0),
    Harness("http", http, http_requests, text_mutation(HTTP_WORDS), HTTP_WORDS, seconds=2.0),
    Harness("web-config", web_config, web_configurations, text_mutation(WEB_WORDS), WEB_WORDS, seconds=5.0),
)
