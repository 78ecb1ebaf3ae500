"""The loop of the sampling process: ticks on time, and answers to the exporter in between."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable

from lockd.kernel.rings import RingReader
from lockd.messages import (
    HERE,
    MOST_SETTLING,
    REQUEST_DETAIL,
    REQUEST_METRICS,
    REQUEST_SETTLED,
    REQUEST_WAITS,
    SETTLED,
    to_memfd,
)
from lockd.process.clock import NS
from lockd.sample.sampler import Sampler

log = logging.getLogger(__name__)

MESSAGE_BYTES = 64
MESSAGES = 16
"""Most messages that are read from the exporter between two ticks, or in LONGEST_PAUSE if ticks are further
apart. After a request for a block, which takes some milliseconds to answer, no further one is read in that
time."""
LONGEST_RARE_TICK = 5 * NS
"""Nanoseconds to which restraint may lengthen the time between ticks. What programs write in a longer time
might not fit into the maps."""
LONGEST_PAUSE = NS
"""Nanoseconds between two calls of `after_tick`, at most. Neither systemd's watchdog nor the replacement of
an exporter that hangs can wait for ticks that are many seconds apart."""


class Loop:
    """Runs `sampler` every `period_ns` nanoseconds until stop(), in one thread, so that nothing waits for a
    lock. While nothing happens on the host, ticks are further apart (Sampler.sleep()).

    `on_message(bytes)` gets the exporter's messages that are no requests, and b"" when the exporter has
    closed its end of the socket. `after_tick()` is called after every tick, and every second between ticks
    that are further apart. It is also called at once when a byte comes on `wakeup`, so that what a signal
    handler asks for does not wait for the next tick.
    """

    def __init__(
        self,
        sampler: Sampler,
        period_ns: int,
        on_message: Callable[[bytes], None],
        after_tick: Callable[[], None],
        wakeup: socket.socket,
    ) -> None:
        self._sampler = sampler
        self.period_ns = period_ns
        self._on_message = on_message
        self._after_tick = after_tick
        self._wakeup = wakeup
        self._stopped = False
        self.control: socket.socket | None = None
        """The non-blocking socket to the exporter; None while no exporter runs."""
        self._settling: list[tuple[socket.socket, int]] = []
        """For each request of the kind REQUEST_SETTLED: the socket to answer on, and the number of the tick
        up to which everything has to be counted first (Sampler.has_counted())."""

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        """Tick and answer until stop() is called, for instance by a signal handler."""
        ended = due = time.monotonic_ns()
        while not self._stopped:
            due = self._sleep_past(due)
            for pause in range(ended + LONGEST_PAUSE, due, LONGEST_PAUSE):
                self._wait_until(pause)
                if not self._stopped:
                    self._after_tick()
            self._wait_until(due)
            if self._stopped:
                break
            started = time.monotonic_ns()
            self._sampler.tick()
            ended = time.monotonic_ns()
            cost = self._sampler.own_cost
            cost.late.note(started - due)
            cost.work.note(ended - started)
            self._after_tick()
            self._answer_settled()
            # A missed tick is not made up for: the window before the next one is longer, and nothing is lost.
            longest = max(self.period_ns, LONGEST_RARE_TICK)
            period = min(self.period_ns * self._sampler.cpu_budget.tick_periods, longest)
            due += period * max((ended - due) // period + 1, 1)

    def _sleep_past(self, due: int) -> int:
        """Sleep until something needs a tick, and return when that tick is due: at `due`, or later.

        The sampler says for how long. A program ends the sleep, or a signal, or a message of the exporter: it
        may ask for something that takes ticks.
        """
        if self._settling or not self.control:  # without an exporter, `after_tick` has to start another
            return due
        end = int(self._sampler.sleep() * NS)
        if end > due:
            wakeups = self._sampler.wakeups
            waiting: list[socket.socket | RingReader] = [self._wakeup, self.control]
            waiting += [wakeups] if wakeups else []
            select.select(waiting, [], [], max(end - time.monotonic_ns(), 0) / NS)
            due = max(due, min(end, time.monotonic_ns()))
        self._sampler.awake()
        return due

    def _wait_until(self, due: int) -> None:
        """Answer the exporter until the monotonic clock shows `due` nanoseconds, or until stop()."""
        messages = MESSAGES
        while not self._stopped:
            left = (due - time.monotonic_ns()) / NS
            waiting = [self._wakeup, *([self.control] if self.control and messages > 0 else [])]
            ready, _, _ = select.select(waiting, [], [], max(left, 0))
            if self._stopped:  # if the exporter has ended as well, it no longer matters
                return
            if self._wakeup in ready:
                self._wakeup.recv(MESSAGE_BYTES)
                self._after_tick()
                continue
            if not ready:
                return
            assert self.control
            if not self._has_room_for_answer():
                messages = 0
            else:
                messages -= MESSAGES if self._take_message(self.control) else 1

    def _has_room_for_answer(self) -> bool:
        """Whether an answer can be sent to the exporter at once.

        No request is read from an exporter that has not read earlier answers: the new answer would have to
        wait, or would be lost while the exporter waits for it.
        """
        return bool(self.control and select.select([], [self.control], [], 0)[1])

    def _take_message(self, control: socket.socket) -> bool:
        """Read and handle one message of the exporter. Returns whether it was a request for a block."""
        try:
            message = control.recv(MESSAGE_BYTES)
        except OSError as error:
            log.warning("the control socket to the exporter failed: %s", error)
            message = b""
        if message == REQUEST_METRICS:
            self._send(control, self._sampler.metrics())
        elif message == REQUEST_DETAIL:
            self._send(control, self._sampler.details())
        elif message == REQUEST_WAITS:
            self._send(control, self._sampler.wait_stacks())
        elif message == REQUEST_SETTLED:
            if len(self._settling) < MOST_SETTLING:
                self._settling.append((control, self._sampler.begin_settling()))
        else:
            self._on_message(message)
        return message in (REQUEST_METRICS, REQUEST_DETAIL, REQUEST_WAITS)

    def _answer_settled(self) -> None:
        # Requests of an exporter that has ended meanwhile are dropped.
        self._settling = [(asker, tick) for asker, tick in self._settling if asker is self.control]
        while self._settling and self._sampler.has_counted(self._settling[0][1]):
            asker, _ = self._settling[0]
            try:
                asker.send(SETTLED)
            except BlockingIOError:  # try again when the exporter has read earlier answers
                break
            except OSError as error:  # as in _send(): the exporter has closed its end, for instance
                log.warning("the control socket to the exporter failed: %s", error)
            del self._settling[0]

    @staticmethod
    def _send(control: socket.socket, block: bytes) -> None:
        try:
            fd = to_memfd(block)
            try:
                socket.send_fds(control, [HERE], [fd])
            finally:
                os.close(fd)
            return
        except OSError as error:
            # There is no memory or no descriptor, or the kernel refuses to pass a descriptor (ETOOMANYREFS):
            # root's processes have sent more than RLIMIT_NOFILE descriptors that nobody has received yet.
            # The error may pass. The exporter gets an answer even so: it sends no other request before that.
            reason = error.strerror
        try:
            control.send(f"no block: {reason}".encode())
        except OSError as error:
            log.warning("the control socket to the exporter failed: %s", error)
            with contextlib.suppress(OSError):  # both ends see the end of the connection
                control.shutdown(socket.SHUT_RDWR)
