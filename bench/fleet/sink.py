"""A server that accepts all data that is written to it, and discards it.

`python -m bench.fleet.sink` prints its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import re


async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept the requests of a connection, one after another."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            await writer.drain()


async def serve() -> None:
    server = await asyncio.start_server(take, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
