"""The loop of the sampling process: ticks on time, and in between answers to the exporter."""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable

from lockd.messages import REQUEST_DETAIL, REQUEST_METRICS, REQUEST_SETTLED, SETTLED, to_memfd
from lockd.process.clock import NS
from lockd.sample.sampler import Sampler

log = logging.getLogger(__name__)

MESSAGE_BYTES = 64
MESSAGES = 16
"""That are taken from the exporter between two ticks, whatever it sends; none after a request for a block,
which takes some milliseconds."""
SETTLING = 10_000
"""Questions that may wait until all is counted."""
WINDOWS = 3
"""Until an event is counted: its window ends, waits for a grace period, is drained."""


class Loop:
    """Runs `sampler` every `period_ns` until stop(); single-threaded, so that nothing waits for a lock.

    `on_message(bytes)` gets what the exporter says besides requests, b"" when its end is
    closed; `each_tick()` is called after every tick.
    """

    def __init__(
        self,
        sampler: Sampler,
        period_ns: int,
        on_message: Callable[[bytes], None],
        each_tick: Callable[[], None],
        wakeup: socket.socket,
    ) -> None:
        self._sampler = sampler
        self.period_ns = period_ns
        self._on_message = on_message
        self._each_tick = each_tick
        self._wakeup = wakeup
        self._stopped = False
        self.control: socket.socket | None = None
        """The socket to the exporter, which must not block; None while there is none."""
        self._settling: list[tuple[socket.socket, int]] = []
        """Who is to be told that everything up to now is counted, and after which tick that may be so."""

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        """Until stop() is called, by a signal handler for instance."""
        due = time.monotonic_ns()
        while not self._stopped:
            self._wait_until(due)
            if self._stopped:
                break
            started = time.monotonic_ns()
            self._sampler.tick()
            ended = time.monotonic_ns()
            cost = self._sampler.own_cost
            cost.late.note(started - due)
            cost.work.note(ended - started)
            self._each_tick()
            self._tell_settled()
            # A tick that is missed is not made up for: its window was only longer.
            period = self.period_ns * self._sampler.cpu_budget.periods
            due += period * max((ended - due) // period + 1, 1)

    def _wait_until(self, due: int) -> None:
        messages = MESSAGES if self._has_room() else 0
        while not self._stopped:
            left = (due - time.monotonic_ns()) / NS
            waiting = [self._wakeup, *([self.control] if self.control and messages > 0 else [])]
            ready, _, _ = select.select(waiting, [], [], max(left, 0))
            if self._stopped:  # an exporter that has ended too is no news
                return
            if self._wakeup in ready:
                self._wakeup.recv(MESSAGE_BYTES)
                continue
            if self.control and self.control in ready:
                messages -= MESSAGES if self._take_message(self.control) else 1
            elif left <= 0:
                return

    def _has_room(self) -> bool:
        """For an answer. An exporter that has not read the last ones is not listened to, so that none is made
        that would have to wait, or be lost while the exporter waits for it."""
        return bool(self.control and select.select([], [self.control], [], 0)[1])

    def _take_message(self, control: socket.socket) -> bool:
        """Whether it was a request for a block, which has been answered."""
        try:
            message = control.recv(MESSAGE_BYTES)
        except OSError as error:
            log.warning("control socket to the exporter: %s", error)
            message = b""
        if message == REQUEST_METRICS:
            self._send(control, self._sampler.metrics())
        elif message == REQUEST_DETAIL:
            self._send(control, self._sampler.details())
        elif message == REQUEST_SETTLED and len(self._settling) < SETTLING:
            self._settling.append((control, self._sampler.own_cost.ticks + WINDOWS))
        else:
            self._on_message(message)
        return message in (REQUEST_METRICS, REQUEST_DETAIL)

    def _tell_settled(self) -> None:
        # An exporter that has ended meanwhile does not wait any more.
        self._settling = [(asker, tick) for asker, tick in self._settling if asker is self.control]
        while self._settling and self._sampler.has_counted(self._settling[0][1]):
            asker, _ = self._settling[0]
            try:
                asker.send(SETTLED)
            except BlockingIOError:  # it is told once it has read what it was sent before
                break
            except OSError as error:  # as in _send()
                log.warning("control socket to the exporter: %s", error)
            del self._settling[0]

    @staticmethod
    def _send(control: socket.socket, block: bytes) -> None:
        try:
            fd = to_memfd(block)
        except OSError as error:  # no memory, no descriptors: it may ask again
            words, fds = f"no block: {error.strerror}", []
        else:
            words, fds = "ok", [fd]
        try:
            socket.send_fds(control, [words.encode()], fds)
        except OSError as error:  # it is gone: its end of the socket will say so
            log.warning("control socket to the exporter: %s", error)
        finally:
            for fd in fds:
                os.close(fd)
