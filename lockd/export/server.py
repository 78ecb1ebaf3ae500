"""HTTP on sockets that are already listening, with limits for slow, many and broken clients."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from typing import Any

from tornado.http1connection import HTTP1ServerConnection
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream, SSLIOStream
from tornado.netutil import ssl_wrap_socket

from lockd.export.handlers import Service, application
from lockd.export.sources import source_of

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
HEADER_TIMEOUT = 10.0
"""Seconds from the connection, or the answer before, to the end of the next request's headers."""
LARGEST_HEADER = 16_384
ACCEPTED_AT_ONCE = 128
ACCEPTED_AGAIN = 1.0
"""Seconds without another try, if there is no descriptor or no memory for a connection."""
_LIMITS: dict[str, int] = {
    "max_buffer_size": 4 * LARGEST_HEADER,
    "read_chunk_size": LARGEST_HEADER,
}
_GRACE = 2.0
"""Seconds that requests have to be answered after the end has been asked for."""


class Server(HTTPServer):
    """Accepts connections and, when there are too many, closes the one that waits longest.

    Many clients that never finish a request can thus not keep out one that does. If all have asked for
    something, one is closed of the source that has most, so that others are served beside it. TLS is
    decided for each connection, so new certificates need no restart.
    """

    def initialize(self, service: Service) -> None:  # type: ignore[override]  # tornado's own way
        super().initialize(
            application(service),
            max_header_size=LARGEST_HEADER,
            # Bodies are refused before they are read, so their size never matters.
            max_body_size=1 << 40,
            idle_connection_timeout=HEADER_TIMEOUT,
            body_timeout=HEADER_TIMEOUT,
        )
        self._service = service
        self._open: dict[IOStream, str] = {}  # the oldest first, with their sources
        self._listening: list[socket.socket] = []

    def serve(self, listening: socket.socket) -> None:
        """Accept connections from now on."""
        listening.setblocking(False)
        self._listening.append(listening)
        self._watch(listening)
        log.info("listening on %s", _text(listening.getsockname()))

    async def finish(self) -> None:
        """Accept nothing more, answer what has been asked, close all connections."""
        while self._listening:
            asyncio.get_running_loop().remove_reader(self._listening.pop())
        end = asyncio.get_running_loop().time() + _GRACE
        while self._service.busy and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        await self.close_all_connections()
        self._service.close()

    def _watch(self, listening: socket.socket) -> None:
        if listening in self._listening:  # it is not the end
            asyncio.get_running_loop().add_reader(listening, self._accept_waiting, listening)

    def _accept_waiting(self, listening: socket.socket) -> None:
        """Tornado's own does not take its eyes from who cannot be let in, and so would be called for ever."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):  # nobody waits, or not any more
                return
            except OSError as error:
                log.warning("no connection can be accepted: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(ACCEPTED_AGAIN, self._watch, listening)
                return
            self._accept(connection, address)

    def _accept(self, connection: socket.socket, address: Any) -> None:
        source = source_of(str(address[0])) if isinstance(address, tuple) else ""
        if len(self._open) >= MOST_CONNECTIONS and not self._close_one_for(source):
            log.debug("%s: refused, all connections are busy", _text(address))
            connection.close()
            return
        tls = self._service.web.current().tls
        try:
            if tls is None:
                stream = IOStream(connection, **_LIMITS)
            else:
                wrapped = ssl_wrap_socket(connection, tls, server_side=True, do_handshake_on_connect=False)
                stream = SSLIOStream(wrapped, ssl_options=tls, **_LIMITS)
        except OSError as error:  # it is gone already
            log.debug("%s: %s", _text(address), error)
            connection.close()
            return
        self._open[stream] = source
        self.handle_stream(stream, address)

    def _close_one_for(self, source: str) -> bool:
        closed = next((stream for stream in self._open if stream not in self._service.busy), None)
        if closed is None:
            counts = Counter(self._open.values())
            most, count = counts.most_common(1)[0]
            if counts[source] + 1 >= count:
                return False
            closed = next(stream for stream, its in self._open.items() if its == most)
        del self._open[closed]
        closed.close()
        return True

    def on_close(self, server_conn: object) -> None:
        super().on_close(server_conn)
        assert isinstance(server_conn, HTTP1ServerConnection)
        self._open.pop(server_conn.stream, None)
        self._service.busy.discard(server_conn.stream)


def _text(address: Any) -> str:
    if not isinstance(address, tuple):
        return str(address)
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
