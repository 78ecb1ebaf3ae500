"""The exporter's end of the control socket, by which it asks the sampler for snapshots.

One request is sent at a time, and equal requests within 200 ms share one answer. However many clients there
are, the sampler therefore makes at most five answers of a kind in a second. There is one exception: after a
request that waits until everything is counted, no earlier answer is used again.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from lockd.errors import LockdError
from lockd.messages import (
    ALIVE,
    HERE,
    MOST_SETTLING,
    NOT_RELOADED,
    PING,
    RELOAD,
    RELOADED,
    REQUEST_SETTLED,
    SERVING,
    SETTLED,
    from_memfd,
)

TIMEOUT = 5.0
"""Seconds that a request waits for its answer."""
SETTLED_TIMEOUT = 45.0
"""Seconds that wait_until_settled() waits. This is enough for three ticks of the longest period, and for the
lookup of a lock's name."""
REUSE = 0.2
"""Seconds for which an answer is used again."""


class SamplerError(LockdError):
    """The sampler does not answer, or its answer breaks a rule."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A block of lockd.messages, and the texts that were made from it, by format. All clients share them."""

    block: memoryview
    texts: dict[Hashable, asyncio.Future[bytes]] = field(default_factory=dict)


class SamplerLink:
    """Sends one request at a time over a SOCK_SEQPACKET socket and distributes the answers.

    An answer that comes after the timeout still belongs to its request. Equal requests that were made in the
    meantime get it, and no other request is sent before it comes. So answers cannot be mixed up, and a
    sampler that is late does not get more requests.
    """

    def __init__(self, control: socket.socket) -> None:
        """An event loop must be running."""
        self._control = control
        self._control.setblocking(False)
        self._asked: dict[bytes, asyncio.Future[Answer]] = {}
        self._in_flight: bytes | None = None
        """The request that the sampler has not answered yet."""
        self._latest: dict[bytes, Answer] = {}
        self._settling: deque[asyncio.Future[None]] = deque()
        """The callers of wait_until_settled(), in the order of their requests."""
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        """Set when the sampler has closed its end, or when sending or receiving has failed."""
        self.reload: Callable[[str, float], bool] = lambda level, share: True
        """Applies a log level and the share of a processor for the requests of one source (`inf`: no limit),
        and reads the web configuration again.

        Returns whether the web configuration is valid.
        """
        self._loop.add_reader(control, self._receive)

    def report_serving(self) -> None:
        """Tell the sampler that the exporter accepts connections."""
        self._send(SERVING)

    async def ask(self, request: bytes) -> Answer:
        """The answer to a request of lockd.messages. Raises SamplerError if the sampler is gone, refuses the
        request, or does not answer within TIMEOUT seconds."""
        if request in self._latest:
            return self._latest[request]
        try:
            return await asyncio.wait_for(self._shared(request), TIMEOUT)
        except asyncio.TimeoutError:  # is TimeoutError only since Python 3.11
            raise SamplerError(
                f"sampler: no answer on the control socket within {TIMEOUT:g} s;"
                " rule: the sampler answers at each tick"
            ) from None

    async def wait_until_settled(self) -> None:
        """Wait until the next answers include everything that happened before the call.

        Raises SamplerError if the sampler is gone, does not answer within SETTLED_TIMEOUT seconds, or has
        MOST_SETTLING such requests to answer already, among them those of callers that have given up.
        """
        if self.closed.is_set():
            raise _gone("the control socket is closed")
        if len(self._settling) >= MOST_SETTLING:
            raise SamplerError(
                f"sampler: {len(self._settling)} requests wait already until everything is counted;"
                f" rule: at most {MOST_SETTLING}"
            )
        is_counted: asyncio.Future[None] = self._loop.create_future()
        # Retrieves the exception even if the caller has given up; else asyncio would log it.
        is_counted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._settling.append(is_counted)
        self._send(REQUEST_SETTLED)
        try:
            # A caller that gives up keeps its place in the queue: the sampler answers requests in order.
            await asyncio.wait_for(asyncio.shield(is_counted), SETTLED_TIMEOUT)
        except asyncio.TimeoutError:  # is TimeoutError only since Python 3.11
            raise SamplerError(
                f"sampler: not everything is counted after {SETTLED_TIMEOUT:g} s;"
                " rule: three ticks, and the time until the locks of all earlier futex calls are known"
            ) from None

    def _shared(self, request: bytes) -> asyncio.Future[Answer]:
        future = self._asked.get(request)
        if future is None:
            if self.closed.is_set():
                raise _gone("the control socket is closed")
            future = self._asked[request] = self._loop.create_future()
            # Retrieves the exception even if all callers have given up; else asyncio would log it.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._send_next()
        return asyncio.shield(future)

    def _send_next(self) -> None:
        if self._in_flight is None and self._asked:
            self._in_flight = next(iter(self._asked))
            self._send(self._in_flight)

    def _receive(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 256, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            self._close(error.strerror)
            return
        if not message and not fds:
            self._close("it has closed the control socket")
            return
        if message == PING and not fds:
            self._send(ALIVE)
            return
        if message.startswith(RELOAD) and not fds:
            _, level, share = message.decode().split()
            self._send(RELOADED if self.reload(level, float(share)) else NOT_RELOADED)
            return
        if message == SETTLED and not fds:
            self._latest.clear()  # these answers may lack events that are counted by now
            if self._settling:
                self._settling.popleft().set_result(None)
            return
        if self._in_flight is None:
            for fd in fds:
                os.close(fd)
            return
        request, self._in_flight = self._in_flight, None
        future = self._asked.pop(request)
        try:
            answer = self._latest[request] = _answer(message, fds)
        except (OSError, ValueError, SamplerError) as error:
            future.set_exception(SamplerError(f"sampler: {error}"))
        else:
            self._loop.call_later(REUSE, self._forget, request, answer)
            future.set_result(answer)
        self._send_next()

    def _send(self, message: bytes) -> None:
        try:
            self._control.send(message)
        except OSError as error:
            self._close(error.strerror)

    def _forget(self, request: bytes, answer: Answer) -> None:
        if self._latest.get(request) is answer:  # after SETTLED it may be a later answer
            del self._latest[request]

    def _close(self, why: str | None) -> None:
        self._loop.remove_reader(self._control)
        self._latest.clear()
        waiting, self._asked = self._asked, {}
        for future in waiting.values():
            future.set_exception(_gone(why or "the control socket is broken"))
        while self._settling:
            self._settling.popleft().set_exception(_gone(why or "the control socket is broken"))
        self.closed.set()


def _answer(message: bytes, fds: list[int]) -> Answer:
    if message != HERE or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise SamplerError(
            f"the answer is {message[:100]!r} with {len(fds)} descriptors; rule: b'ok' with one memfd"
        )
    return Answer(from_memfd(fds[0]))


def _gone(why: str) -> SamplerError:
    return SamplerError(f"sampler: gone: {why}")
