"""A real exporter process on a real socket, with a stand-in for the sampler at its other end."""

from __future__ import annotations

import array
import contextlib
import http.client
import os
import select
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockd.export.catalog import CATALOG
from lockd.messages import (
    REQUEST_DETAIL,
    REQUEST_METRICS,
    REQUEST_SETTLED,
    REQUEST_WAITS,
    SERVE,
    SETTLED,
    pack,
    to_memfd,
)

REPOSITORY = Path(__file__).resolve().parents[2]
EDGES = [4**i / 1e6 for i in range(14)]
PATIENT = (
    "-c",
    "import sys; from lockd.export import __main__ as main, server;"
    "server.HEADER_TIMEOUT = 1e6; sys.exit(main.main())",
)
"""Arguments of Python for an exporter that waits for days for a request's headers and for TLS handshakes."""


def full_block(rows: int = 2, comm: str = "comm") -> bytes:
    """Return a block with `rows` series of every metric of the catalogue, each with other values."""
    metrics: list[dict[str, Any]] = []
    arrays: dict[str, array.array[Any]] = {}
    for at, metric in enumerate(CATALOG.values()):
        n = rows if metric.labels else 1
        labels = [
            [f"{comm}-{row}" if label == "comm" else f"{label}-{row}" for label in metric.labels]
            for row in range(n)
        ]
        metrics.append({"name": metric.name, "labels": labels})
        if metric.kind == "histogram":
            counts = [at + row + slot for row in range(n) for slot in range(len(EDGES) + 1)]
            arrays[f"{metric.name}.buckets"] = array.array("q", counts)
            arrays[f"{metric.name}.sum"] = array.array("d", [at + row + 0.25 for row in range(n)])
        else:
            arrays[metric.name] = array.array("d", [1000.0 * at + row + 0.5 for row in range(n)])
    return pack({"metrics": metrics, "buckets": EDGES}, arrays)


def detail_block(rows: int = 3) -> bytes:
    whole = ("tid", "tgid", "blocked_count")
    tables = {
        name: {
            "is_cut": False,
            "text": {
                "unit": [f"unit-{row % 2}" for row in range(rows)],
                "comm": [f"comm-{row}" for row in range(rows)],
                "kind": ["lock" if row % 2 else "cond" for row in range(rows)],
                "thread_comm": [f"thread-{row}" for row in range(rows)],
                "program": ["futex"] * rows,
                "lock": [f"lock-{row}" for row in range(rows)],
                "address": [f"{0x1000 + row:#x}" for row in range(rows)],
            },
            "numbers": [*whole, "blocked_us", "waiting_us"],
            "lists": {
                "stack": [["main", f"f{row}"] for row in range(rows)],
                **({"holders": [[] for _ in range(rows)]} if name == "locks" else {}),
            },
        }
        for name in ("threads", "locks", "bottlenecks", "deadlocks")
    }
    arrays: dict[str, array.array[Any]] = {}
    for name in tables:
        arrays.update({f"{name}.{column}": array.array("q", range(rows)) for column in whole})
        for column in ("blocked_us", "waiting_us"):
            arrays[f"{name}.{column}"] = array.array("d", [row + 0.5 for row in range(rows)])
    arrays["locks.key"] = array.array("q", range(rows))
    arrays["locks.since"] = array.array("d", [1.5] * rows)
    return pack({"tables": tables, "time": 1700000000.25, "monotonic": 500.0}, arrays)


def waits_block(later: float = 0.0, more: int = 0, clock_set: float = 0.0) -> bytes:
    """Return the block of waits off the CPU as it is `later` seconds later, after `more` waits in each group.

    The additional waits take 100 us each. They are at the second stack of the group, if it has one.
    """
    ns = 100_000 * more
    head = {
        "functions": ["read", "load", "main", "schedule", "vfs_read", "notify", "wake_up", "nanosleep"],
        "stacks": [[[0, 1, 2], [3, 4]], [[7, 2], [3]], [[5, 2], [6]], [[], []], [[0, 2], [3, 4]]],
        "groups": [
            ["shop.service", "shop", "sleep", 4_000_000 + ns, 4 + more, 1],
            ["shop.service", "shop", "disk", 600_000 + ns, 2 + more, 0],
            ["db.service", "db", "poll", 90_000 + ns, 3 + more, 0],
        ],
        "samples": [
            [0, 1, "irq", 3, 2_000_000, 2],
            [1, 0, "kswapd0", 2, 600_000, 3],
            [1, 4, "shop", 2, 300_000 + ns, 1 + more],
        ],
        "time": 1700000000.0 + later + clock_set,
        "monotonic": 500.0 + later,
    }
    return pack(head, {"waiting_ns": array.array("q", [10**10])})


class Sampler:
    """A stand-in for the sampler: a thread answers the exporter's requests, or holds the answers back."""

    def __init__(self, blocks: Mapping[bytes, bytes]) -> None:
        self.blocks = dict(blocks)
        self.later: dict[bytes, bytes] = {}
        """By request, the block that takes the place of the one in `blocks` after that has been sent once."""
        self.requests: list[bytes] = []
        self.answers = threading.Event()
        self.answers.set()
        self.serving = threading.Event()
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.send(SERVE)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                message = self.ours.recv(64)
            except OSError:
                return
            if not message:
                return
            if message == b"serving":
                self.serving.set()
                continue
            self.requests.append(message)
            self.answers.wait()
            if message == REQUEST_SETTLED:
                self.ours.send(SETTLED)
                continue
            fd = to_memfd(self.blocks[message])
            self.blocks[message] = self.later.pop(message, self.blocks[message])
            try:
                socket.send_fds(self.ours, [b"ok"], [fd])
            except OSError:
                return
            finally:
                os.close(fd)

    def leave(self) -> None:
        self.answers.set()
        with contextlib.suppress(OSError):
            self.ours.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self.ours.close()


class Exporter:
    def __init__(self, process: subprocess.Popen[bytes], port: int, sampler: Sampler) -> None:
        self.process = process
        self.port = port
        self.sampler = sampler
        self.tls: ssl.SSLContext | None = None

    def ask(
        self,
        path: str,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float = 15,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        if self.tls:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=timeout, context=self.tls
            )
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body=body, headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=15)

    def status(self) -> dict[str, str]:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)

    def stderr(self) -> str:
        """Return what the exporter has logged since the last call."""
        assert self.process.stderr
        text = b""
        while select.select([self.process.stderr], [], [], 0)[0]:
            piece = os.read(self.process.stderr.fileno(), 65536)
            if not piece:
                break
            text += piece
        return text.decode()


@contextmanager
def shared_directory() -> Iterator[Path]:
    """Yield a directory that the exporter's user can read too. pytest's own are only for the tests' user."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@contextmanager
def exporter(
    *options: str,
    blocks: Mapping[bytes, bytes] | None = None,
    run: tuple[str, str] = ("-m", "lockd.export"),
    fds: Sequence[int] = (),
) -> Iterator[Exporter]:
    sampler = Sampler(
        blocks
        or {REQUEST_METRICS: full_block(), REQUEST_DETAIL: detail_block(), REQUEST_WAITS: waits_block()}
    )
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    fds = [sampler.theirs.fileno(), listening.fileno(), *fds]
    process = subprocess.Popen(
        [sys.executable, *run, f"--control-fd={fds[0]}", f"--listen-fd={fds[1]}", *options],
        pass_fds=fds,
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
    )
    sampler.theirs.close()
    running = Exporter(process, listening.getsockname()[1], sampler)
    listening.close()
    try:
        while process.poll() is None and not sampler.serving.wait(0.05):
            pass
        if not sampler.serving.is_set():
            raise AssertionError(f"the exporter did not start: {running.stderr()}")
        yield running
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()
        sampler.leave()
