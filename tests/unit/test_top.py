"""`lockd top` against a real HTTP server that answers like the daemon, and on a real terminal."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import ssl
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lockd.top import Options, duration, plain, shown
from lockd.top_rates import Client, Rates, Row, Table

ROOT = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"
SECOND = 1_000_000  # in microseconds


def thread(tid: int = 11, **changes: Any) -> dict[str, Any]:
    return {
        "unit": "shop.service",
        "comm": "shopd",
        "thread_comm": "worker",
        "program": "futex",
        "kind": "lock",
        "lock": "stock_mutex",
        "tid": tid,
        "tgid": 10,
        "blocked_us": 0,
        "blocked_count": 0,
        "max_blocked_us": 0,
        "waiting_us": 0,
    } | changes


def lock(address: str = "0x1000", **changes: Any) -> dict[str, Any]:
    return {
        "program": "futex",
        "kind": "lock",
        "unit": "shop.service",
        "comm": "shopd",
        "lock": "stock_mutex",
        "site": "sell_one",
        "address": address,
        "tgid": 10,
        "blocked_us": 0,
        "blocked_count": 0,
        "max_blocked_us": 0,
        "waiting": 0,
        "threads": 2,
        "stack": [],
    } | changes


class Daemon:
    """An HTTP server on a free port; `threads` and `locks` give what it says at its n-th look."""

    def __init__(self) -> None:
        self.threads: Callable[[int], list[dict[str, Any]]] = lambda n: []
        self.locks: Callable[[int], list[dict[str, Any]]] = lambda n: []
        self.time: Callable[[int], Any] = lambda n: 1000.0 + n
        self.answer: tuple[int, dict[str, str], bytes] | None = None
        self.asked: list[tuple[str, str]] = []
        self.looks = {"threads": 0, "locks": 0}
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                daemon.asked.append((self.path, self.headers.get("Authorization", "")))
                status, headers, body = daemon.answer or (200, {}, daemon.say(self.path))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say(self, path: str) -> bytes:
        name = path.partition("?")[0].rpartition("/")[2]
        n = self.looks[name]
        self.looks[name] += 1
        return json.dumps({"time": self.time(n), name: getattr(self, name)(n)}).encode()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon()
    yield daemon
    daemon.close()


def top(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-m", "lockd", "top", "--interval=100ms", *args],
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """The rows of each table in the output, by the titles of the columns."""
    found: dict[str, list[dict[str, str]]] = {}
    for block in re.split(r"^(?=locks$|threads$)", text, flags=re.MULTILINE)[1:]:
        title, header, *lines = [line.rstrip() for line in block.splitlines() if line.strip()]
        if header == "nothing blocked":
            found[title] = []
            continue
        columns = [m[0] for m in re.finditer(r"\S+(?: \S+)*", header)]
        rows = [re.split(r"\s{2,}|\s(?=\S)", line.strip()) for line in lines]
        found[title] = [dict(zip(columns, row, strict=False)) for row in rows]
    return found


# --- Once -----------------------------------------------------------------------------------------


def test_rates_between_two_looks(daemon: Daemon) -> None:
    daemon.threads = lambda n: [
        thread(blocked_us=90 * SECOND + n * 250_000, blocked_count=500 + n * 20,
               max_blocked_us=2 * SECOND),
    ]  # fmt: skip
    daemon.locks = lambda n: [
        lock(blocked_us=90 * SECOND + n * 1_500_000, blocked_count=500 + n * 200,
             max_blocked_us=2 * SECOND, waiting=3, threads=7, holder="seller", holder_tid=12),
    ]  # fmt: skip
    done = top("--once", f"--url={daemon.url}")
    assert (done.returncode, done.stderr) == (0, "")
    header = done.stdout.splitlines()[0]
    assert header.startswith(f"lockd top  {daemon.url}  waiting now: 0  blocked: 250.0ms a second")
    assert header.rstrip().endswith("waits: 20.0 a second")
    shown = tables(done.stdout)
    assert shown["locks"] == [
        {
            "BLOCKED/S": "1.50s",
            "WAITS/S": "200",
            "MAX": "2.00s",
            "WAITING": "3",
            "THREADS": "7",
            "HOLDER": "seller[12]",
            "KIND": "lock",
            "LOCK": "stock_mutex",
            "SITE": "sell_one",
            "PROCESS": "shopd[10]",
            "UNIT": "shop.service",
        }
    ]
    assert shown["threads"] == [
        {
            "BLOCKED/S": "250.0ms",
            "WAITS/S": "20.0",
            "MAX": "2.00s",
            "WAITING": "-",
            "KIND": "lock",
            "THREAD": "worker[11]",
            "WAITS FOR": "stock_mutex",
            "PROCESS": "shopd[10]",
            "UNIT": "shop.service",
        }
    ]
    assert daemon.looks == {"threads": 2, "locks": 2}


def test_a_pipe_gets_it_once_without_asking(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(blocked_count=n, blocked_us=n)]
    done = top(f"--url={daemon.url}")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert len(tables(done.stdout)["threads"]) == 1


def test_what_is_stuck_counts_while_it_lasts(daemon: Daemon) -> None:
    """A thread that waits all the time is blocked one second a second, though no wait has ended."""
    daemon.threads = lambda n: [
        thread(tid=1, blocked_us=n * 500_000, blocked_count=n),
        thread(tid=2, waiting_us=600 * SECOND + n * SECOND, lock="deadlock"),
    ]
    daemon.locks = lambda n: [
        lock("0x1", blocked_us=n * 500_000, blocked_count=n, lock="busy"),
        lock("0x2", waiting=2, lock="deadlock"),
    ]
    shown = tables(top("--once", f"--url={daemon.url}").stdout)
    assert [row["THREAD"] for row in shown["threads"]] == ["worker[2]", "worker[1]"]
    assert shown["threads"][0]["BLOCKED/S"] == "1.00s"
    assert shown["threads"][0]["MAX"] == shown["threads"][0]["WAITING"] == "10m01s"
    assert [row["LOCK"] for row in shown["locks"]] == ["deadlock", "busy"]


KINDS = ("lock", "pi", "cond", "other")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ([], {"lock", "pi", "mutex"}),
        (["--kind=pi"], {"pi", "mutex"}),
        (["--kind=cond,lock"], {"cond", "lock", "mutex"}),
        (["--kind=all"], {*KINDS, "mutex", "interruptible"}),
    ],
)
def test_kinds(daemon: Daemon, flag: list[str], expected: set[str]) -> None:
    def threads(n: int) -> list[dict[str, Any]]:
        some = [thread(kind=kind, blocked_us=n, blocked_count=n) for kind in KINDS]
        some.append(thread(program="kernel_locks", kind="mutex", blocked_us=n, blocked_count=n))
        some.append(thread(program="offcpu", kind="interruptible", blocked_us=n * SECOND, blocked_count=n))
        return some

    daemon.threads = threads
    done = top("--once", f"--url={daemon.url}", *flag)
    assert {row["KIND"] for row in tables(done.stdout)["threads"]} == expected
    # The waits are in the off-CPU time once more: it is no part of the totals.
    assert f"waits: {len(expected - {'interruptible'})}.0 a second" in done.stdout


@pytest.mark.parametrize(
    ("sort", "order"),
    [("blocked", [1, 3, 2]), ("max", [2, 1, 3, 4]), ("waiting", [3, 1, 2])],
)
def test_order(daemon: Daemon, sort: str, order: list[int]) -> None:
    daemon.threads = lambda n: [
        thread(tid=1, blocked_us=n * 900_000, blocked_count=n, max_blocked_us=SECOND),
        thread(tid=2, blocked_us=n * 100_000, blocked_count=n, max_blocked_us=5 * SECOND),
        thread(tid=3, waiting_us=n * 500_000),
        thread(tid=4, blocked_us=3, blocked_count=3, max_blocked_us=3),  # nothing new
    ]
    shown = tables(top("--once", f"--url={daemon.url}", f"--sort={sort}").stdout)
    assert [row["THREAD"] for row in shown["threads"]] == [f"worker[{tid}]" for tid in order]


def test_how_long_kernel_locks_are_held(daemon: Daemon) -> None:
    def held(address: str, taken: int, us: float, **more: Any) -> dict[str, Any]:
        numbers = {"acquisitions": taken, "holds": taken, "held_us": us, "max_held_us": us, "holding_us": 0}
        return lock(address, program="kernel_locks", kind="mutex", tgid=0) | numbers | more

    daemon.locks = lambda n: [
        held("0x1", 10 * n, 250_000 * n, lock="busy", blocked_us=100_000 * n, blocked_count=n),
        held("0x1", 5 * n, 125_000 * n, lock="busy too", comm="other"),  # the same lock
        held("0x2", 1, 0, lock="stuck", max_held_us=9 * SECOND, holding_us=(8 + n) * SECOND),
        held("0x3", 7, 70, lock="idle"),
        lock("0x4", lock="of user space", blocked_us=n * SECOND),
    ]
    daemon.threads = lambda n: [thread(tid, blocked_us=n * tid) for tid in (1, 3, 2)]
    shown = tables(top("--once", f"--url={daemon.url}", "--sort=held").stdout)
    columns = ("LOCK", "HELD/S", "TAKEN/S", "MAX HELD", "HOLDING", "BLOCKED/S", "PROCESS")
    assert [tuple(row[column] for column in columns) for row in shown["locks"]] == [
        ("stuck", "1.00s", "0.0", "9.00s", "9.00s", "0", "shopd"),
        ("busy", "375.0ms", "15.0", "250.0ms", "-", "100.0ms", "shopd"),
    ]
    assert [row["THREAD"] for row in shown["threads"]] == ["worker[3]", "worker[2]", "worker[1]"]


def test_a_daemon_that_does_not_say_how_long_locks_are_held(daemon: Daemon) -> None:
    assert top("--once", f"--url={daemon.url}", "--sort=held").returncode == 0  # there are none
    daemon.locks = lambda n: [lock()]
    message = fails(f"--url={daemon.url}", "--sort=held")
    assert (
        f"{daemon.url} does not say how long locks are held: it needs programs.kernel_locks.mode" in message
    )


def test_limit(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(tid, blocked_us=n * tid) for tid in range(1, 40)]
    daemon.locks = lambda n: [lock(hex(at), blocked_us=n * at) for at in range(1, 40)]
    shown = tables(top("--once", f"--url={daemon.url}", "--limit=3").stdout)
    assert [row["THREAD"] for row in shown["threads"]] == ["worker[39]", "worker[38]", "worker[37]"]
    assert len(shown["locks"]) == 3


def test_nothing_blocked(daemon: Daemon) -> None:
    done = top("--once", f"--url={daemon.url}")
    assert tables(done.stdout) == {"locks": [], "threads": []}


def test_names_cannot_steer_the_terminal(daemon: Daemon) -> None:
    evil = "\x1b]0;owned\x07[red]x\n\u202e"
    daemon.threads = lambda n: [thread(thread_comm=evil, lock=evil, blocked_us=n)]
    done = top("--once", f"--url={daemon.url}")
    assert "?]0;owned?[red]x??[11]" in done.stdout
    assert not set(done.stdout) & {"\x1b", "\x07", "\u202e"}


def test_an_output_that_cannot_show_every_letter(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(thread_comm="überprüfer", blocked_us=n)]
    done = top("--once", f"--url={daemon.url}", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?berpr?fer[11]" in done.stdout


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_narrow_outputs_lose_columns_and_letters_but_no_numbers(daemon: Daemon, width: int) -> None:
    name = "a-thread-with-a-very-long-name-indeed"
    daemon.threads = lambda n: [
        thread(thread_comm=name, lock=name * 3, unit=name, blocked_us=n * 123_456_000)
    ]
    done = top("--once", f"--url={daemon.url}", COLUMNS=str(width))
    assert all(len(line) <= width for line in done.stdout.splitlines())
    (row,) = tables(done.stdout)["threads"]
    assert row["BLOCKED/S"] == "2m03s"
    assert ("UNIT" in row) == (width >= 110)


def test_a_daemon_whose_numbers_stand_still(daemon: Daemon) -> None:
    daemon.time = lambda n: 1000.0
    done = top("--once", f"--url={daemon.url}")
    assert done.returncode == 1
    assert done.stderr == (
        f"lockd: error: the numbers of {daemon.url} do not change: 6 looks, 0.1s apart, found the same time\n"
    )


def test_a_slow_daemon_is_asked_again(daemon: Daemon) -> None:
    daemon.time = lambda n: 1000.0 + n // 3
    daemon.threads = lambda n: [thread(blocked_us=n // 3 * SECOND, blocked_count=n // 3)]
    (row,) = tables(top("--once", f"--url={daemon.url}").stdout)["threads"]
    assert row["BLOCKED/S"] == "1.00s"


# --- No daemon, or not the right one --------------------------------------------------------------


def fails(*args: str) -> str:
    done = top("--once", *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert all(line.startswith("lockd: error: ") for line in done.stderr.splitlines())
    return done.stderr


def test_no_daemon(daemon: Daemon) -> None:
    daemon.close()  # a port where certainly nobody listens
    message = fails(f"--url={daemon.url}")
    assert f"no daemon answers at {daemon.url}; start it with: lockd run" in message


def test_no_such_host() -> None:
    url = "http://host.invalid:9776"
    assert f"no daemon answers at {url}: " in fails(f"--url={url}")


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"{}", b'{"time": 1}', b'{"time": 1, "locks": [{}]}', b"[" * 100_000,
     json.dumps({"time": 1, "locks": [lock(kind=[])]}).encode(),
     json.dumps({"time": 1, "locks": [lock(blocked_us=None)]}).encode()],
)  # fmt: skip
def test_something_else_answers(daemon: Daemon, body: bytes) -> None:
    daemon.answer = (200, {}, body)
    assert f"{daemon.url}/api/v1/locks is not an answer of lockd: " in fails(f"--url={daemon.url}")


def test_an_error_status(daemon: Daemon) -> None:
    daemon.answer = (503, {}, b"")
    message = fails(f"--url={daemon.url}")
    assert f"{daemon.url}/api/v1/locks answered 503 Service Unavailable" in message


def test_a_password_is_sent_and_never_shown(daemon: Daemon) -> None:
    daemon.answer = (401, {}, b"")
    message = fails(f"--url=http://me:s%40cret@127.0.0.1:{daemon.port}/prefix/")
    assert "wants a user name and password (401)" in message
    assert "cret" not in message
    expected = f"Basic {base64.b64encode(b'me:s@cret').decode()}"
    assert daemon.asked == [("/prefix/api/v1/locks?limit=1000", expected)]


def test_a_redirect_is_not_followed(daemon: Daemon) -> None:
    daemon.answer = (302, {"Location": f"{daemon.url}/elsewhere"}, b"")
    assert "answered 302" in fails(f"--url=http://me:secret@127.0.0.1:{daemon.port}")
    assert len(daemon.asked) == 1


def test_no_proxy_is_asked(daemon: Daemon) -> None:
    done = top("--once", f"--url={daemon.url}", http_proxy="http://127.0.0.1:1")
    assert done.returncode == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_tls(daemon: Daemon, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    daemon.server.socket = context.wrap_socket(daemon.server.socket, server_side=True)
    url = daemon.url.replace("http:", "https:")
    assert f"{url}: its certificate is not trusted: " in fails(f"--url={url}")
    assert top("--once", f"--url={url}", "--insecure").returncode == 0
    trusted = top("--once", f"--url={url}", SSL_CERT_FILE=str(certificate))
    assert trusted.returncode == 0, trusted.stderr


# --- Live, on a terminal --------------------------------------------------------------------------


class Terminal:
    """`lockd top` on a pseudo-terminal of its own, and all that it wrote there."""

    def __init__(self, *args: str, rows: int = 24, columns: int = 120, term: str = "xterm") -> None:
        self.text = ""
        command = [PYTHON, "-m", "lockd", "top", "--interval=100ms", *args]
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
            os.execve(PYTHON, command, environment | {"TERM": term})
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, words: str) -> str:
        """What was written up to `words`, which may have been written already."""
        end = time.monotonic() + 60
        while words not in self.text:
            assert time.monotonic() < end, f"{words!r} not in {self.text!r}"
            if select.select([self.fd], [], [], 1)[0]:
                self.text += os.read(self.fd, 65536).decode()
        before, _, self.text = self.text.partition(words)
        return before

    def end(self) -> tuple[int, str]:
        """The exit code and what was still to be read."""
        rest = self.text
        while True:
            try:
                rest += os.read(self.fd, 65536).decode()
            except OSError:  # EIO: the program has closed its end
                os.close(self.fd)
                return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), rest


OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


def test_live_until_ctrl_c(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(blocked_us=n * 250_000, blocked_count=n)]
    terminal = Terminal(f"--url={daemon.url}")
    terminal.wait_for(OTHER_SCREEN)
    terminal.wait_for("measuring ...")
    terminal.wait_for("250.0ms")
    terminal.wait_for("worker[11]")
    terminal.wait_for("worker[11]")  # and again
    os.write(terminal.fd, b"\x03")
    code, rest = terminal.end()
    assert code == 0
    assert FIRST_SCREEN in rest
    assert "Traceback" not in rest and "KeyboardInterrupt" not in rest


def test_live_gives_the_screen_back_when_ended(daemon: Daemon) -> None:
    terminal = Terminal(f"--url={daemon.url}")
    terminal.wait_for("nothing blocked")
    os.kill(terminal.pid, signal.SIGTERM)
    code, rest = terminal.end()
    assert code == 128 + signal.SIGTERM
    assert FIRST_SCREEN in rest


def test_live_goes_on_while_the_daemon_restarts(daemon: Daemon) -> None:
    # After its restart the daemon counts from nought: less than before is all new.
    daemon.threads = lambda n: [
        thread(blocked_count=1000 + n if n < 5 else n, blocked_us=100 * SECOND if n < 5 else SECOND)
    ]
    terminal = Terminal(f"--url={daemon.url}", "--sort=max")
    terminal.wait_for("worker[11]")
    daemon.answer = (503, {}, b"")
    terminal.wait_for("answered 503")
    terminal.wait_for("worker[11]")  # the last numbers stay
    daemon.answer = None
    while "answered 503" in terminal.wait_for("lockd top"):
        pass
    os.write(terminal.fd, b"\x03")
    assert terminal.end()[0] == 0


def test_live_follows_the_size_of_the_terminal(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(tid, blocked_us=n * tid) for tid in range(100, 200)]
    terminal = Terminal(f"--url={daemon.url}", rows=20, columns=100)
    terminal.wait_for("worker[199]")
    terminal.wait_for("lockd top")
    frame = terminal.wait_for("lockd top")
    assert frame.count("worker[") == 6
    assert "UNIT" not in frame
    terminal.resize(40, 160)
    terminal.wait_for("UNIT")
    terminal.wait_for("lockd top")
    frame = terminal.wait_for("lockd top")
    assert frame.count("worker[") == 16
    assert "UNIT" in frame
    os.write(terminal.fd, b"\x03")
    assert terminal.end()[0] == 0


def test_no_daemon_on_a_terminal_leaves_the_screen_alone(daemon: Daemon) -> None:
    daemon.close()
    code, text = Terminal(f"--url={daemon.url}").end()
    assert code == 1
    assert "start it with: lockd run" in text
    assert OTHER_SCREEN not in text


@pytest.mark.parametrize(("flags", "term"), [(["--once"], "xterm"), ([], "dumb")])
def test_once_on_a_terminal(daemon: Daemon, flags: list[str], term: str) -> None:
    daemon.threads = lambda n: [thread(blocked_us=n * SECOND)]
    code, text = Terminal(f"--url={daemon.url}", *flags, term=term).end()
    assert code == 0
    assert "worker[11]" in text
    assert OTHER_SCREEN not in text


# --- The parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0"), (1, "1us"), (999, "999us"), (999.6, "1.0ms"), (1000, "1.0ms"), (999_949, "999.9ms"),
     (999_950, "1.00s"), (59.99e6, "59.99s"), (59.999e6, "1m00s"), (200e6, "3m20s"),
     (3599.7e6, "1h00m"), (7500e6, "2h05m"), (100 * 3600e6, "100h00m")],
)  # fmt: skip
def test_durations(us: float, text: str) -> None:
    assert duration(us) == text


def test_plain_names_stay() -> None:
    assert plain("Überprüfer 検査 [a]") == "Überprüfer 検査 [a]"


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "key": 1, "program": "futex", "kind": "lock", "unit": "", "comm": "", "tgid": 1,
        "lock": "", "blocked_us": 0, "count": 0, "max_us": 0, "waiting_us": 0, "waiting": 0,
    }  # fmt: skip
    return Row(**values | changes)


def fed(*looks: tuple[float, list[Row]]) -> Table | None:
    rates = Rates()
    table = None
    for time_, rows in looks:
        table = rates.feed(Table(time_, tuple(rows)))
    return table


def test_the_first_look_has_no_rates() -> None:
    assert fed((1.0, [row(count=5)])) is None


def test_rates_use_the_clock_of_the_daemon() -> None:
    table = fed((1.0, [row(count=5)]), (3.0, [row(count=9, blocked_us=SECOND)]))
    assert table is not None
    assert (table.rows[0].count_rate, table.rows[0].blocked_rate) == (2.0, 0.5)


def test_a_clock_that_was_set_back_costs_one_look() -> None:
    back = [(9.0, [row(count=1)]), (2.0, [row(count=3)])]
    assert fed(*back) is None
    table = fed(*back, (3.0, [row(count=4)]))
    assert table is not None and table.rows[0].count_rate == 1.0


def test_new_rows_are_all_new() -> None:
    table = fed((1.0, []), (2.0, [row(count=7)]))
    assert table is not None and table.rows[0].count_rate == 7.0


def test_rows_that_were_too_many_to_be_seen_before_are_not_new(daemon: Daemon) -> None:
    def threads(n: int) -> list[dict[str, Any]]:
        first = 1 + n * 10  # ten of them give way to others
        return [thread(tid, blocked_us=9 * SECOND) for tid in range(first, first + 1000)]

    daemon.threads = threads
    client, rates = Client(daemon.url), Rates()
    assert rates.feed(client.threads()) is None
    table = rates.feed(client.threads())
    assert table is not None and len(table.rows) == 1000
    assert {row.blocked_rate for row in table.rows} == {0.0}


def test_lost_counts_are_all_new() -> None:
    before, after = row(count=7, blocked_us=7 * SECOND), row(count=2, blocked_us=SECOND)
    table = fed((1.0, [before]), (2.0, [after]))
    assert table is not None
    assert (table.rows[0].count_rate, table.rows[0].blocked_rate) == (2.0, 1.0)


def test_a_wait_that_a_filter_leaves_out_makes_no_rate() -> None:
    table = fed((1.0, [row(blocked_us=9 * SECOND)]), (2.0, [row(blocked_us=0)]))
    assert table is not None and table.rows[0].blocked_rate == 0.0


def test_rows_of_one_thread_are_one(daemon: Daemon) -> None:
    daemon.threads = lambda n: [
        thread(lock="first", blocked_us=5, blocked_count=1, max_blocked_us=5),
        thread(lock="now", blocked_us=2, blocked_count=2, max_blocked_us=2, waiting_us=3),
        thread(lock="else", tgid=99),
    ]
    both, other = Client(daemon.url).threads().rows
    assert (both.lock, both.blocked_us, both.count, both.max_us, both.waiting) == (
        "now",
        10,
        3,
        5,
        1,
    )
    assert other.lock == "else"


def test_nulls_are_no_names(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(unit=None, lock=None, waiting_us=None)]
    (only,) = Client(daemon.url).threads().rows
    assert (only.unit, only.lock, only.waiting) == ("", "", 0)


def test_off_cpu_time_only_with_all_kinds() -> None:
    offcpu = row(program="offcpu", kind="interruptible")
    assert not shown(offcpu, frozenset({"lock", "pi", "cond"}))
    assert shown(offcpu, frozenset(KINDS))


def test_options_are_frozen() -> None:
    options = Options("http://h", 1, False, "max", frozenset(), None, False)
    with pytest.raises(AttributeError):
        options.sort = "blocked"  # type: ignore[misc]
