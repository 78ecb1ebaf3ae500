"""The exporter's end of the control socket: asks the sampler for snapshots.

Any number of scrapers cost the sampler no more than one: requests wait for each other,
the same requests at the same time share one answer, and so do requests 200 ms apart.
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
"""How many seconds a request waits for its answer."""
SETTLED_TIMEOUT = 10.0
"""The same for word that everything is counted. A lock that is being looked up may take half of that."""
REUSE = 0.2
"""An answer younger than this many seconds is used again."""


class SamplerError(LockdError):
    """The sampler does not answer, or not as agreed."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A block of lockd.messages, and what has been made of it for others who share it."""

    block: memoryview
    made: dict[Hashable, asyncio.Future[bytes]] = field(default_factory=dict)


class SamplerLink:
    """Sends one request at a time over a SOCK_SEQPACKET socket and hands out the answers.

    An answer that comes too late still answers its request: whoever asks the same in the
    meantime gets it, and nothing else is asked before. So answers cannot be mixed up, and a
    sampler that is behind is not asked for more.
    """

    def __init__(self, control: socket.socket) -> None:
        """To be made while an event loop runs."""
        self._control = control
        self._control.setblocking(False)
        self._asked: dict[bytes, asyncio.Future[Answer]] = {}
        self._flying: bytes | None = None
        self._latest: dict[bytes, Answer] = {}
        self._settling: deque[asyncio.Future[None]] = deque()
        """Who waits until everything is counted, in the order of their requests."""
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        """Set once the sampler has closed its end."""
        self.reload: Callable[[str, float], bool] = lambda level, share: True
        """Takes a level of the log and a share for requests, and reads the web configuration; whether that is
        right."""
        self._loop.add_reader(control, self._receive)

    def say_serving(self) -> None:
        self._say(SERVING)

    async def ask(self, request: bytes) -> Answer:
        """The answer to one of lockd.messages's requests."""
        if request in self._latest:
            return self._latest[request]
        try:
            return await asyncio.wait_for(self._shared(request), TIMEOUT)
        except asyncio.TimeoutError:  # the builtin one only since Python 3.11
            raise SamplerError(
                f"sampler: no answer on the control socket within {TIMEOUT:g} s;"
                " rule: it answers between two of its sampling periods"
            ) from None

    async def settled(self) -> None:
        """Wait until everything that happened before the call is in the next answers."""
        if self.closed.is_set():
            raise _gone("the control socket is closed")
        is_counted: asyncio.Future[None] = self._loop.create_future()
        # Whoever waits may have given up: its error is then nobody's.
        is_counted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._settling.append(is_counted)
        try:
            self._control.send(REQUEST_SETTLED)
        except OSError as error:
            self._close(error.strerror)
        try:
            # Whoever gives up keeps its place: the sampler answers one request after another.
            await asyncio.wait_for(asyncio.shield(is_counted), SETTLED_TIMEOUT)
        except asyncio.TimeoutError:  # the builtin one only since Python 3.11
            raise SamplerError(
                f"sampler: not everything is counted after {SETTLED_TIMEOUT:g} s;"
                " rule: three sampling periods, and until the locks of all futex calls before are known"
            ) from None

    def _shared(self, request: bytes) -> asyncio.Future[Answer]:
        future = self._asked.get(request)
        if future is None:
            if self.closed.is_set():
                raise _gone("the control socket is closed")
            future = self._asked[request] = self._loop.create_future()
            # All who waited may have given up: their error is then nobody's.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._send_next()
        return asyncio.shield(future)

    def _send_next(self) -> None:
        if self._flying is None and self._asked:
            self._flying = next(iter(self._asked))
            try:
                self._control.send(self._flying)
            except OSError as error:
                self._close(error.strerror)

    def _receive(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 256, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            self._close(error.strerror)
            return
        if not message and not fds:
            self._close("the sampler has closed it")
            return
        if message == PING and not fds:
            self._say(ALIVE)
            return
        if message.startswith(RELOAD) and not fds:
            _, level, share = message.decode().split()
            self._say(RELOADED if self.reload(level, float(share)) else NOT_RELOADED)
            return
        if message == SETTLED and not fds:
            self._latest.clear()  # answers from before
            if self._settling:
                self._settling.popleft().set_result(None)
            return
        if self._flying is None:
            for fd in fds:
                os.close(fd)
            return
        request, self._flying = self._flying, None
        future = self._asked.pop(request)
        try:
            answer = self._latest[request] = _answer(message, fds)
        except (OSError, ValueError, SamplerError) as error:
            future.set_exception(SamplerError(f"sampler: {error}"))
        else:
            self._loop.call_later(REUSE, self._forget, request, answer)
            future.set_result(answer)
        self._send_next()

    def _say(self, message: bytes) -> None:
        try:
            self._control.send(message)
        except OSError as error:
            self._close(error.strerror)

    def _forget(self, request: bytes, answer: Answer) -> None:
        if self._latest.get(request) is answer:  # and not a later one, after everything was counted
            del self._latest[request]

    def _close(self, why: str | None) -> None:
        self._loop.remove_reader(self._control)
        self._latest.clear()
        waiting, self._asked = self._asked, {}
        for future in waiting.values():
            future.set_exception(_gone(why or "broken"))
        while self._settling:
            self._settling.popleft().set_exception(_gone(why or "broken"))
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
