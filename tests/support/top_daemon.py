"""An HTTP server that answers like the daemon, and `lockd top` against it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"
SECOND = 1_000_000  # in microseconds
KINDS = ("lock", "pi", "cond", "other")


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
    """An HTTP server on a free port. `threads`, `locks`, `bottlenecks` give its answers to the n-th look."""

    def __init__(self) -> None:
        self.threads: Callable[[int], list[dict[str, Any]]] = lambda n: []
        self.locks: Callable[[int], list[dict[str, Any]]] = lambda n: []
        self.bottlenecks: Callable[[int], list[dict[str, Any]]] = lambda n: []
        self.time: Callable[[int], Any] = lambda n: 1000.0 + n
        self.monotonic: Callable[[int], Any] | None = None
        """None stands for a daemon of a version that does not tell it."""
        self.answer: tuple[int, dict[str, str], bytes] | None = None
        self.asked: list[tuple[str, str]] = []
        self.looks = Counter[str]()
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
        monotonic = {"monotonic": self.monotonic(n)} if self.monotonic else {}
        return json.dumps({"time": self.time(n), **monotonic, name: getattr(self, name)(n)}).encode()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def serving() -> Iterator[Daemon]:
    """Yield a server that is closed at the end of the context."""
    daemon = Daemon()
    try:
        yield daemon
    finally:
        daemon.close()


def top(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `lockd top` in a pipe, without a terminal. `environment` may say how wide a terminal is."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return subprocess.run(
        [PYTHON, "-m", "lockd", "top", "--interval=100ms", *args],
        check=False,
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each table in the output, by the titles of the columns."""
    found: dict[str, list[dict[str, str]]] = {}
    for block in re.split(r"^(?=locks$|threads$|holders$|bottlenecks$)", text, flags=re.MULTILINE)[1:]:
        title, header, *lines = [line.rstrip() for line in block.splitlines() if line.strip()]
        if header == "nothing blocked":
            found[title] = []
            continue
        columns = [m[0] for m in re.finditer(r"\S+(?: \S+)*", header)]
        rows = [re.split(r"\s{2,}|\s(?=\S)", line.strip()) for line in lines]
        found[title] = [dict(zip(columns, row, strict=False)) for row in rows]
    return found


def fails(*args: str) -> str:
    done = top("--once", *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert all(line.startswith("lockd: error: ") for line in done.stderr.splitlines())
    return done.stderr
