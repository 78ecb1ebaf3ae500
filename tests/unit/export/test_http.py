"""The exporter process over HTTP: what it answers, its limits, its end, its privileges."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import html
import json
import os
import pwd
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import bcrypt
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tornado.web import HTTPError

from lockd.export import handlers, server
from lockd.export.sources import LOOPBACK, MOST_SOURCES, Allowance, source_of
from lockd.messages import REQUEST_METRICS, pack
from lockd.service.exporter import ENDING_SECONDS
from tests.support.exporter_process import (
    PATIENT,
    REPOSITORY,
    Exporter,
    exporter,
    full_block,
    shared_directory,
)

ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def running() -> Iterator[Exporter]:
    with exporter() as one:
        yield one


def test_metrics_as_text_and_as_openmetrics(running: Exporter) -> None:
    status, headers, body = running.ask("/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert "Content-Encoding" not in headers
    parse: Any = text_string_to_metric_families
    families = {family.name: family for family in parse(body.decode())}
    assert families["lockd_resident_bytes"].samples[-1].labels == {"process": "exporter"}
    assert families["lockd_resident_bytes"].samples[-1].value > 10 << 20
    status, headers, body = running.ask(
        "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_gzip_if_asked_for(running: Exporter) -> None:
    plain = running.ask("/metrics")[2]
    _, headers, body = running.ask("/metrics", headers={"Accept-Encoding": "br, gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert len(body) < len(plain) / 5
    assert gzip.decompress(body).splitlines()[0] == plain.splitlines()[0]


@pytest.mark.parametrize(
    ("accepts", "zipped"),
    [
        ("gzip", True),
        ("GZIP;q=0.5", True),
        ("deflate, gzip ; q=1.0", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, identity", False),
        ("gzip;Q=0", False),
        ("xgzip", False),
        ("", False),
    ],
)
def test_gzip_only_if_it_is_accepted(running: Exporter, accepts: str, zipped: bool) -> None:
    _, headers, _ = running.ask("/metrics", headers={"Accept-Encoding": accepts})
    assert headers["Content-Encoding"] == ("gzip" if zipped else None)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9776", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:9776", 200),
        ("192.0.2.1:9776", 200),
        ("[::1]:9776", 200),
        ("myhost:9776", 200),
        (f"{socket.gethostname()}:9776", 200),
        ("lockd.localhost:9776", 200),
        ("evil.example:9776", 403),
        ("evil.example", 403),
        (f"{socket.gethostname().partition('.')[0]}.evil.example", 403),
        ("127.0.0.1.evil.example.", 403),
        ("localhost.evil.example", 403),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/api/v1/locks"])
def test_a_page_of_somebody_else_cannot_read_it_by_a_name_of_its_own(
    running: Exporter, path: str, host: str, status: int
) -> None:
    assert running.ask(path, headers={"Host": host})[0] == status


@pytest.mark.parametrize("path", ["/", "/metrics", "/-/healthy", "/-/ready", "/api/v1/locks"])
def test_head_has_the_headers_of_get_and_no_body(running: Exporter, path: str) -> None:
    status, headers, body = running.ask(path)
    assert (status, len(body)) == (200, int(headers["Content-Length"]))
    assert headers["Server"] == "lockd"
    with running.connect() as client:
        client.sendall(f"HEAD {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"Content-Length: " in head
    assert rest == b""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "NONSENSE"])
@pytest.mark.parametrize("path", ["/metrics", "/api/v1/locks", "/nothing"])
def test_other_methods(running: Exporter, method: str, path: str) -> None:
    status, headers, _ = running.ask(path, method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_bodies_are_refused_unread(running: Exporter) -> None:
    assert running.ask("/metrics", "POST", body=b"x" * 100)[0] == 405
    assert running.ask("/metrics", "GET", body=b"x" * 100)[0] == 413
    with running.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 405")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /metrics HTTP/1.1\r\nTransfer-Encoding: chunked", "405"),
        ("BREW /metrics HTTP/1.1\r\nTransfer-Encoding: chunked", "405"),
        ("GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked", "413"),
        ("GET /metrics HTTP/1.1\r\nTransfer-Encoding: nonsense", "413"),
        ("GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "413"),
        ("GET /metrics HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5", "413"),
        ("GET /metrics HTTP/1.1\r\nContent-Length: nonsense", "413"),
        ("GET /metrics HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked", "413"),
    ],
)
@pytest.mark.parametrize("body", ["nonsense\r\n", "5\r\nhelloXX0\r\n\r\n", "GET / HTTP/1.1\r\n\r\n"])
def test_a_broken_body_is_one_answer_and_no_line_in_the_log(
    running: Exporter, head: str, status: str, body: str
) -> None:
    running.stderr()
    for _ in range(3):
        with running.connect() as client:
            client.sendall(f"{head}\r\nHost: a\r\n\r\n{body}".encode())
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := client.recv(65536):
                    answer += piece
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert answer.count(b"HTTP/1.1") == 1
    assert running.ask("/-/healthy")[0] == 200
    assert running.stderr() == ""


def test_what_is_not_there(running: Exporter) -> None:
    status, headers, body = running.ask("/nothing")
    assert (status, body) == (404, b"Not Found\n")
    assert headers["Content-Type"].startswith("text/plain")
    status, headers, body = running.ask("/api/v1/nothing")
    assert (status, json.loads(body)) == (404, {"error": "Not Found"})
    assert headers["Content-Type"] == "application/json"


def test_page_links_to_what_there_is(running: Exporter) -> None:
    page = running.ask("/")[2].decode()
    api = ("api/v1/locks", "api/v1/threads", "api/v1/bottlenecks", "api/v1/deadlocks")
    for path in ("metrics", *api, "-/healthy", "-/ready", "-/settled"):
        assert f'href="{path}"' in page
        assert running.ask(f"/{path}")[0] == 200
    for path in ("debug/pprof/offcpu", "debug/pprof/wakers", "flamegraph?program=offcpu&by=waker"):
        assert f'href="{html.escape(path)}"' in page
        assert running.ask(f"/{path}")[0] == 200


def test_tables(running: Exporter) -> None:
    status, headers, body = running.ask("/api/v1/threads")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    answer = json.loads(body)
    assert (answer["time"], answer["monotonic"]) == (1700000000.25, 500.0)
    assert answer["threads"][1] == {
        "unit": "unit-1",
        "comm": "comm-1",
        "kind": "lock",
        "thread_comm": "thread-1",
        "program": "futex",
        "lock": "lock-1",
        "tid": 1,
        "tgid": 1,
        "blocked_count": 1,
        "blocked_us": 1.5,
        "waiting_us": 1.5,
        "address": "0x1001",
        "stack": ["main", "f1"],
    }
    assert list(answer["threads"][0])[5:8] == ["lock", "address", "tid"]
    found = json.loads(running.ask("/api/v1/locks?kind=cond&unit=unit-0&unknown=1&limit=1")[2])
    assert [row["tid"] for row in found["locks"]] == [0]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("limit=0", 'parameter limit: "0"; rule: a whole number from 1 to 1000'),
        ("limit=1001", "rule: a whole number from 1 to 1000"),
        ("limit=-5", "parameter limit"),
        ("limit=x", 'parameter limit: "x"'),
        ("limit=%C2%B2", "parameter limit"),
        ("limit=", "parameter limit"),
        ("limit=1&limit=2", "parameter limit: given 2 times; rule: once"),
        ("comm=%FF", "parameter comm"),
    ],
)
def test_bad_queries_say_what_is_wrong(running: Exporter, query: str, says: str) -> None:
    status, _, body = running.ask(f"/api/v1/threads?{query}")
    assert status == 400
    assert says in json.loads(body)["error"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"\x16\x03\x01\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * 20_000 + b"\r\n\r\n",
    ],
)
def test_broken_clients_are_closed(running: Exporter, request_bytes: bytes) -> None:
    with running.connect() as client:
        client.sendall(request_bytes)
        client.settimeout(5)
        try:
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert running.ask("/-/healthy")[0] == 200


def test_two_hundred_scrapes_at_once_share_snapshots(running: Exporter) -> None:
    running.ask("/metrics")
    before, began = len(running.sampler.requests), time.monotonic()
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda _: running.ask("/metrics"), range(200)))
    assert {status for status, _, _ in answers} == {200}
    periods = (time.monotonic() - began) / 0.2
    assert len(running.sampler.requests) - before <= periods + 1


def _slow_clients(running: Exporter) -> list[socket.socket]:
    """Return more clients than connections are allowed, each of which has sent a part of a request."""
    slow = []
    for _ in range(300):
        slow.append(running.connect())
        slow[-1].sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
    return slow


def test_slow_clients_do_not_delay_others() -> None:
    with exporter(run=PATIENT) as running:
        slow = _slow_clients(running)
        assert running.ask("/metrics", timeout=60)[0] == 200
        for client in slow:
            client.close()


def test_slow_clients_do_not_stay() -> None:
    with exporter() as running:
        slow = _slow_clients(running)
        gone_at = time.monotonic() + 60
        while time.monotonic() < gone_at and not _gone(slow[-1]):
            time.sleep(0.5)
            try:
                slow[-1].sendall(b"a")  # a byte now and then gives it no more time
            except OSError:
                break
        assert all(_gone(client) for client in slow)
        for client in slow:
            client.close()


def _gone(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


IMPATIENT = (
    "import sys; from lockd.export import __main__ as main, handlers;"
    "handlers.REPLY_TIMEOUT = 0.5; sys.exit(main.main())"
)
"""The code of an exporter that gives a client half a second to read an answer."""


def test_a_client_that_asks_and_never_reads_does_not_stay() -> None:
    """The time limit must include the headers, which are nearly all bytes of a short answer."""
    with exporter(run=("-c", IMPATIENT)) as running, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # before connect() sets the window
        client.connect(("127.0.0.1", running.port))
        client.setblocking(False)
        poll = select.poll()
        poll.register(client, select.POLLHUP | select.POLLERR)
        until = time.monotonic() + 30
        while not poll.poll(10):
            assert time.monotonic() < until
            with contextlib.suppress(BlockingIOError, ConnectionError):
                client.send(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        assert running.ask("/-/healthy")[0] == 200


def test_clients_that_never_read_do_not_keep_others_out() -> None:
    """All of them are at the address of the client that reads. Their answers do not fit into the kernel.

    They are the first clients: the server may still have the connection of an earlier one, and have to close
    one of theirs.
    """
    with exporter(blocks={REQUEST_METRICS: full_block(60)}) as running, contextlib.ExitStack() as stack:
        deaf = [stack.enter_context(socket.socket()) for _ in range(server.MOST_CONNECTIONS)]
        for client in deaf:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", running.port))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for client in deaf:
            client.settimeout(60)
            assert client.recv(1) == b"H"
        status, _, answer = running.ask("/metrics", timeout=60)
        assert status == 200 and len(answer) > 4 * server.SEND_BUFFER
        ports = [client.getsockname()[1] for client in deaf]
        assert sum(_unread_bytes(running.port, port) > 0 for port in ports) == len(deaf) - 1


def test_an_answer_that_nobody_reads_takes_little_memory_of_the_kernel() -> None:
    with exporter(blocks={REQUEST_METRICS: full_block(60)}) as running, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", running.port))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        client.settimeout(60)
        assert client.recv(1) == b"H"
        sizes = [0, 1]
        while sizes[-1] != sizes[-2]:
            time.sleep(0.5)
            sizes.append(_unread_bytes(running.port, client.getsockname()[1]))
        assert 0 < sizes[-1] <= 4 * server.SEND_BUFFER


def _unread_bytes(port: int, client_port: int) -> int:
    """Return how many bytes the kernel keeps that this server has sent and this client has no room for.

    It is 0 for a connection that the kernel does not know any more.
    """
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if (int(local[-4:], 16), int(remote[-4:], 16)) == (port, client_port):
            return int(queues.partition(":")[0], 16)
    return 0


DEAR = (
    "import sys; from lockd.export import __main__ as main, handlers;"
    "handlers.SETTLED_SECONDS = 1e6; sys.exit(main.main())"
)
"""The code of an exporter for which one question uses up the allowance of its source."""


def test_who_asks_for_too_much_is_told_to_wait() -> None:
    with exporter("--requests-share=0.25", run=("-c", DEAR)) as running:
        assert running.ask("/metrics")[0] == 200
        assert running.ask("/-/settled")[0] == 200
        for path in ("/-/settled", "/api/v1/locks", "/debug/pprof/futex", "/flamegraph"):
            status, headers, body = running.ask(path)
            assert (status, headers["Retry-After"]) == (429, "1")
            assert b"Requests from your address have used up their CPU time" in body
        for path in ("/", "/metrics", "/-/healthy", "/-/ready"):
            assert running.ask(path)[0] == 200
        assert running.stderr().count("\n") <= 2


HELD_BACK = """
import runpy, signal, sys, threading
from lockd.export import handlers
go_on = threading.Event()
def held_back(*arguments, **more):
    print("table", file=sys.stderr, flush=True)
    go_on.wait()
    return b"{}"
handlers.render_table = held_back
signal.signal(signal.SIGUSR1, lambda *_: go_on.set())
runpy.run_module("lockd.export", run_name="__main__", alter_sys=True)
"""
"""The code of an exporter that makes no table before SIGUSR1. It writes a line when it begins one."""


def test_however_many_ask_for_tables_and_leave_scrapes_do_not_wait_for_them() -> None:
    """What a client asked for is made even if the client has gone, and so it still counts as one of many."""
    most = handlers.MOST_WAITING_OF_SOURCE
    with exporter(run=("-c", HELD_BACK)) as running, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(running.connect()) for _ in range(200)]
        for client in clients:
            client.sendall(b"GET /api/v1/locks?limit=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        refused = set[socket.socket]()
        while len(refused) < len(clients) - most:
            answered = select.select(set(clients) - refused, [], [], 60)[0]
            assert answered, f"{len(refused)} were refused"
            assert all(client.recv(65536).startswith(b"HTTP/1.1 503 ") for client in answered)
            refused |= set(answered)
        for client in clients:
            client.close()
        assert running.ask("/metrics", timeout=60)[0] == 200
        status, headers, body = running.ask("/debug/pprof/futex")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert b"Too many requests for tables and profiles" in body
        running.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + 60
        while (status := running.ask("/debug/pprof/futex")[0]) == 503:
            assert time.monotonic() < until
        assert status == 200
        while running.ask("/api/v1/locks")[0] == 503:
            assert time.monotonic() < until
        assert running.stderr().splitlines().count("table") == most + 1


def test_requests_that_were_let_in_together_do_not_all_spend_the_last_of_the_allowance() -> None:
    async def statuses(sources: list[str]) -> list[int]:
        made = [service.render(source, lambda: 200) for source in sources]
        answers = await asyncio.gather(*made, return_exceptions=True)
        return [one if isinstance(one, int) else cast(HTTPError, one).status_code for one in answers]

    service = handlers.Service(cast(Any, None), cast(Any, None), 1.0)
    service.work = Allowance(share=1e-9, saved=1e-9)  # a microsecond is more than a source may spend
    try:
        assert asyncio.run(statuses(["a", "a", "b", "a"])) == [200, 429, 200, 429]
    finally:
        service.close()


def test_a_source_is_who_can_choose_between_addresses() -> None:
    assert source_of("192.0.2.7") == source_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert source_of("127.0.0.1") == source_of("127.8.9.1") == source_of("::1") == LOOPBACK
    assert source_of("::ffff:127.0.0.1") == LOOPBACK
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1%eth0") != source_of("2001:db8:0:1::1")


def test_each_source_has_an_allowance_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("lockd.export.sources.time.monotonic", lambda: now[0])
    allowance = Allowance(share=0.1, saved=2.0)
    for _ in range(19):
        assert not allowance.seconds_until_allowed("a")
        allowance.spend("a", 0.11)
    assert allowance.seconds_until_allowed("a") == pytest.approx(0.9)
    assert not allowance.seconds_until_allowed("b")
    now[0] += 1.0  # adds 0.1 s to the allowance
    assert not allowance.seconds_until_allowed("a")
    allowance.spend("a", 0.2)
    assert allowance.seconds_until_allowed("a") == pytest.approx(1.9)
    for number in range(2 * MOST_SOURCES):
        allowance.spend(str(number), 3.0)
    # So many sources are not remembered: the debt of "a" is forgotten.
    assert not allowance.seconds_until_allowed("a")
    assert allowance.seconds_until_allowed(str(2 * MOST_SOURCES - 1))


def test_with_another_share_nobody_owes_what_the_former_one_made_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockd.export.sources.time.monotonic", lambda: 1000.0)
    allowance = Allowance(share=0.25, saved=10.0)
    allowance.spend("a", 11.0)
    assert allowance.seconds_until_allowed("a") == pytest.approx(4.0)
    allowance.set_share(0.25)
    assert allowance.seconds_until_allowed("a") == pytest.approx(4.0)
    allowance.set_share(float("inf"))
    assert not allowance.seconds_until_allowed("a")
    allowance.spend("a", 1000.0)
    assert not allowance.seconds_until_allowed("a")


def test_ready_only_while_the_sampler_answers() -> None:
    with exporter() as running:
        assert running.ask("/-/ready")[0] == 200
        time.sleep(0.3)
        running.sampler.answers.clear()
        before, began = len(running.sampler.requests), time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(running.ask, path, timeout=60) for path in ("/-/ready", "/metrics")]
            while len(running.sampler.requests) == before:
                time.sleep(0.01)
            assert running.ask("/-/healthy")[0] == 200
            assert not any(one.done() for one in asked), "they wait, and others do not"
            for each in asked:
                status, _, body = each.result()
                assert status == 503
                assert b"no answer on the control socket within 5 s" in body
        assert time.monotonic() - began > 4.5
        running.sampler.answers.set()
        assert running.ask("/metrics")[0] == 200


HASTY = """
import runpy
from lockd.export import basic_auth, handlers, link, server
server._GRACE = 0.2
server.HEADER_TIMEOUT = handlers.REPLY_TIMEOUT = link.TIMEOUT = 1e6
basic_auth.WRONG_SHARE = basic_auth.WRONG_SAVED = 1e-6
runpy.run_module("lockd.export", run_name="__main__", alter_sys=True)
"""
"""The code of an exporter that ends soon, unless it waits for a timeout, which takes days here.

After one wrong password it waits for minutes before it checks the next one.
"""
ENDED_SECONDS = 30
"""Seconds that the exporter may take to end on a busy host."""


def test_sampler_gone_is_503_and_then_the_end() -> None:
    with exporter(run=("-c", HASTY)) as running:
        running.sampler.answers.clear()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(running.ask, "/metrics")
            while REQUEST_METRICS not in running.sampler.requests:
                time.sleep(0.01)
            running.sampler.ours.shutdown(socket.SHUT_RDWR)
            running.sampler.answers.set()
            status, _, body = asked.result()
        assert status == 503
        assert b"sampler: gone" in body
        assert running.process.wait(ENDED_SECONDS) == 0
        assert "Traceback" not in running.stderr()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_cleanly_when_asked_to(number: signal.Signals) -> None:
    with exporter(run=("-c", HASTY)) as running:
        idle = running.connect()
        assert running.ask("/metrics")[0] == 200
        running.process.send_signal(number)
        assert running.process.wait(ENDED_SECONDS) == 0
        assert idle.recv(1) == b""
        assert "Traceback" not in running.stderr()
        idle.close()


def test_the_daemon_waits_for_longer_than_an_exporter_takes_to_end() -> None:
    assert server._GRACE + server._FAREWELL < ENDING_SECONDS


def test_who_guesses_passwords_cannot_delay_the_end() -> None:
    """Guesses that wait for their check must not delay the end: after three seconds the daemon kills it."""
    wrong = {"Authorization": "Basic " + base64.b64encode(b"alice:guess").decode()}
    with shared_directory() as directory:
        config = directory / "web.yml"
        known = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
        config.write_text(f"basic_auth_users:\n  alice: {known}\n")
        with exporter(f"--web-config={config}", run=("-c", HASTY)) as running:
            assert running.ask("/metrics", headers=wrong)[0] == 401
            with ThreadPoolExecutor(3) as pool:
                asked = [pool.submit(running.ask, "/metrics", headers=wrong, timeout=120) for _ in range(3)]
                time.sleep(0.5)
                assert not any(one.done() for one in asked)
                running.process.send_signal(signal.SIGTERM)
                try:
                    assert running.process.wait(ENDED_SECONDS) == 0
                finally:
                    running.process.kill()
                assert all(isinstance(one.exception(), ConnectionError) for one in asked)
            said = running.stderr()
    assert [line.rpartition("ending: ")[2] for line in said.splitlines()][-1] == "received a signal", said


def test_a_profile_of_a_minute_does_not_delay_the_end() -> None:
    with exporter(run=("-c", HASTY)) as running, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.ask, "/debug/pprof/futex?seconds=60", timeout=120)
        while not running.sampler.requests:
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        try:
            assert running.process.wait(ENDED_SECONDS) == 0
        finally:
            running.process.kill()
        assert isinstance(asked.exception(), ConnectionError)
        said = running.stderr()
    assert [line.rpartition("ending: ")[2] for line in said.splitlines()][-1] == "received a signal", said


@pytest.mark.skipif(not ROOT, reason="needs root: gives privileges up")
def test_no_privileges_are_left(running: Exporter) -> None:
    status = running.status()
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["NoNewPrivs"] == "1"
    try:
        user = pwd.getpwnam("lockd")
    except KeyError:
        user = pwd.getpwnam("nobody")
    assert set(status["Uid"].split()) == {str(user.pw_uid)}
    assert set(status["Gid"].split()) == {str(user.pw_gid)}
    assert status["Groups"].strip() == ""


def test_a_block_it_does_not_understand_is_500_and_in_the_log() -> None:
    block = pack({"metrics": [{"name": "lockd_nonsense", "labels": []}], "buckets": []}, {})
    with exporter(blocks={REQUEST_METRICS: block}) as running:
        status, _, body = running.ask("/metrics")
        assert status == 500
        assert b"lockd_nonsense" in body
        assert "lockd_nonsense" in running.stderr()


def test_wrong_descriptors_are_an_error_without_a_traceback() -> None:
    with socket.socketpair()[0] as deaf:
        fd = str(deaf.fileno())
        for control, listen, says in (
            ("77", fd, "--control-fd: 77: Bad file descriptor; rule: an open socket"),
            (fd, fd, f"--listen-fd: {fd}: it does not listen; rule: a listening socket"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "lockd.export", "--control-fd", control, "--listen-fd", listen],
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                check=False,
                pass_fds=[int(fd)],
            )
            assert done.returncode == 1
            assert says in done.stderr
            assert "Traceback" not in done.stderr


FEW_DESCRIPTORS = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
runpy.run_module("lockd.export", run_name="__main__", alter_sys=True)
"""


def test_without_descriptors_for_connections() -> None:
    """The exporter waits for free descriptors, logs that now and then, and answers once there are some."""
    words = "no connection can be accepted: Too many open files"
    with exporter(run=("-c", FEW_DESCRIPTORS)) as running:
        began, said = time.monotonic(), ""
        waiting = [running.connect() for _ in range(40)]
        while said.count(words) < 2:
            time.sleep(0.1)
            said += running.stderr()
        seconds = time.monotonic() - began
        for one in waiting:
            one.close()
        assert running.ask("/metrics")[0] == 200
    assert said.count(words) <= 1 + seconds / server.ACCEPTED_AGAIN
    assert len(said.splitlines()) < said.count(words) + 3, said
