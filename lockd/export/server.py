"""The HTTP server: accepts connections on listening sockets, with limits for slow and for many clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from typing import Any

from tornado.http1connection import HTTP1ServerConnection
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream, SSLIOStream
from tornado.netutil import ssl_wrap_socket

from lockd.export.handlers import Service, abort, application
from lockd.export.sources import source_of
from lockd.printable import host_port

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
HEADER_TIMEOUT = 10.0
"""Seconds from the start of the connection, or from the last answer, to the end of a request's headers."""
LARGEST_HEADER = 16_384
"""The most bytes of a request's headers."""
SEND_BUFFER = 128 * 1024
"""Bytes of unread answers that the kernel holds for a connection, in up to twice as much memory (SO_SNDBUF).

Without this limit, the buffer for a client that does not read could grow to some megabytes, which the kernel
counts as memory of the service.
"""
ACCEPTED_AT_ONCE = 128
"""Connections that are accepted before other events are handled."""
ACCEPTED_AGAIN = 1.0
"""Seconds until the next attempt after accept() failed, for instance because there was no descriptor."""
_LIMITS: dict[str, int] = {
    "max_buffer_size": 4 * LARGEST_HEADER,
    "read_chunk_size": LARGEST_HEADER,
}
_GRACE = 2.0
"""Seconds that finish() waits for the answers to requests."""
_FAREWELL = 0.5
"""Seconds that finish() waits, after _GRACE, for handlers to notice the end of their connections."""


class Server(HTTPServer):
    """Accepts connections. If there are too many, it closes the oldest one whose client is to blame.

    Such a client has sent no whole request, or does not read its answer. However many of them there are,
    they keep out no other client, not even at the same address. If every client waits for lockd, the server
    closes a connection of the source that has the most, so that other sources are served as well. TLS is set
    up for each connection, so new certificates need no restart.
    """

    def initialize(self, service: Service) -> None:  # type: ignore[override]  # tornado calls it from __new__
        super().initialize(
            application(service),
            max_header_size=LARGEST_HEADER,
            # Handlers refuse requests with a body before it is read, so its size never matters.
            max_body_size=1 << 40,
            idle_connection_timeout=HEADER_TIMEOUT,
            body_timeout=HEADER_TIMEOUT,
        )
        self._service = service
        self._open: dict[IOStream, str] = {}
        """The sources of open connections, the oldest connection first."""
        self._listening: list[socket.socket] = []

    def serve(self, listening: socket.socket) -> None:
        """Start to accept connections."""
        listening.setblocking(False)
        self._listening.append(listening)
        self._watch(listening)
        log.info("listening on %s", _text(listening.getsockname()))

    async def finish(self) -> None:
        """Stop accepting connections, answer the pending requests, and close all connections.

        Requests without an answer after _GRACE seconds are given up, as their handlers may wait for a minute.
        """
        while self._listening:
            asyncio.get_running_loop().remove_reader(self._listening.pop())
        end = asyncio.get_running_loop().time() + _GRACE
        while self._service.busy and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().set_exception_handler(_pass_over_cancelled)
        for stream in list(self._open):
            stream.close()
        self._service.close()
        with contextlib.suppress(asyncio.TimeoutError):  # is TimeoutError only since Python 3.11
            await asyncio.wait_for(self.close_all_connections(), _FAREWELL)

    def _watch(self, listening: socket.socket) -> None:
        if listening in self._listening:  # finish() removes the socket
            asyncio.get_running_loop().add_reader(listening, self._accept_waiting, listening)

    def _accept_waiting(self, listening: socket.socket) -> None:
        """Accept the pending connections.

        Tornado's own accept handler continues to poll the socket if accept() fails, for instance for lack of
        descriptors. The event loop would then call it without end.
        """
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):  # no connection is pending any more
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
            log.debug("%s: refused: all connections are busy", _text(address))
            connection.close()
            return
        tls = self._service.web.current().tls
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            if tls is None:
                stream = IOStream(connection, **_LIMITS)
            else:
                wrapped = ssl_wrap_socket(connection, tls, server_side=True, do_handshake_on_connect=False)
                stream = SSLIOStream(wrapped, ssl_options=tls, **_LIMITS)
        except OSError as error:  # the client has closed the connection
            log.debug("%s: %s", _text(address), error)
            connection.close()
            return
        self._open[stream] = source
        self.handle_stream(stream, address)

    def _close_one_for(self, source: str) -> bool:
        """Close a connection to make room for one of `source`. Returns whether there is room.

        A stream that waits to write most likely has a client that does not read, because others read their
        answer in milliseconds. Streams without a request have no precedence over streams that wait to write:
        the oldest of both kinds is closed. Among many clients that do not read, the only stream without a
        request can be a new one whose request is on its way.
        """
        busy = self._service.busy
        closed = next((stream for stream in self._open if stream not in busy or stream.writing()), None)
        if closed is None:
            counts = Counter(self._open.values())
            most, count = counts.most_common(1)[0]
            if counts[source] + 1 >= count:
                return False
            closed = next(stream for stream, owner in self._open.items() if owner == most)
        del self._open[closed]
        abort(closed)
        return True

    def on_close(self, server_conn: object) -> None:
        super().on_close(server_conn)
        assert isinstance(server_conn, HTTP1ServerConnection)
        self._open.pop(server_conn.stream, None)
        self._service.busy.pop(server_conn.stream, None)


def _pass_over_cancelled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors as the loop does by default, except those of handlers that are cancelled as the loop ends.

    Tornado asks each handler for its result, and so raises CancelledError in a callback.
    """
    if not isinstance(context.get("exception"), asyncio.CancelledError):
        loop.default_exception_handler(context)


def _text(address: Any) -> str:
    return host_port(*address[:2]) if isinstance(address, tuple) else str(address)
