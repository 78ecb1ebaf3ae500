"""Simulated hosts, which answer scrapes with the recorded expositions of real lockd daemons.

`python -m bench.fleet.simulated_hosts HOSTS RECORDING…` serves all hosts from one process on one port, and
prints the port. Each host has a path of its own: /0, /1 and so on. Hosts with the same load begin at
different scrapes of its recording.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.fleet.recording import Recording

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Hosts:
    """A server of `count` hosts, to which the recordings are assigned in turn."""

    def __init__(self, count: int, recordings: Sequence[Recording]) -> None:
        self._hosts = list(itertools.islice(itertools.cycle(recordings), count))
        self._loads = len(recordings)
        self._began = time.monotonic()

    def exposition(self, host: int) -> bytes:
        recording = self._hosts[host]
        scrape = int((time.monotonic() - self._began) / recording.step)
        return recording.exposition(scrape + host // self._loads % len(recording.scrapes))

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after another."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                body = self.exposition(int(request.split(b" ", 2)[1].strip(b"/")))
                head = f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Encoding: gzip\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()


async def serve(hosts: Hosts) -> None:
    server = await asyncio.start_server(hosts.answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    count, *paths = sys.argv[1:]
    asyncio.run(serve(Hosts(int(count), [Recording.load(Path(path)) for path in paths])))
