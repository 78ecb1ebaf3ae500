"""Sees to it that an exporter serves: notices one that has ended or hangs, and starts another."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from lockd.children import Exporter, how_it_ended
from lockd.errors import LockdError, error_of
from lockd.snapshot import PING, SERVING

log = logging.getLogger(__name__)

PING_SECONDS = 2.0
"""Between two questions whether it is alive."""
LONGEST_SILENCE, LONGEST_START = 15, 60
"""Questions in a row without an answer after which it hangs: of one that serves; of one that does not yet, as
an overloaded host takes long to start Python. They are counted, as time also passes while this process is
stopped, in which nothing is asked."""
SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds from the end of one to the start of the next: twice as long each time, until one has served for
longer than that. Never none: whoever ends all processes of a service may end this one last."""


class Supervisor:
    """To be asked to look() at every tick. Never waits: not for an answer, and not for an end."""

    def __init__(self, start: Callable[[], Exporter], exporter: Exporter) -> None:
        """`exporter` has been started; there is something to serve from now on."""
        self._start_another = start
        self.exporter: Exporter | None = None
        """None from the loss of one to the start of the next."""
        self._unanswered = 0
        self._ask_at = 0.0
        self._serving_since = 0.0
        """0 until it serves."""
        self.has_served = False
        """This one, or one before it."""
        self._lost: Exporter | None = None
        """The last one, until it has ended."""
        self._why_lost = ""
        """Empty if it is its end that tells."""
        self._start_at = 0.0
        self._pause = SHORTEST_PAUSE
        self.trouble = ""
        """Why nothing is served, in words; empty if something is, or is about to be."""
        self.restarts = 0
        self._use(exporter)

    def note(self, message: bytes) -> bool:
        """What the exporter says, b"" if its end of the socket is closed; whether it has begun to serve."""
        self._unanswered = 0
        if not message:
            self._lose("")
        if message != SERVING or self._serving_since:
            return False
        self._serving_since = time.monotonic()
        self.has_served, self.trouble = True, ""
        return True

    def look(self) -> None:
        """Raises LockdError if the first one ends before it serves; why it did, it has logged itself."""
        now = time.monotonic()
        if self.exporter:
            if now >= self._ask_at:
                self._ask_at = now + PING_SECONDS
                self._ask(self.exporter)
        elif self._lost:
            self._look_at_lost(self._lost, now)
        elif now >= self._start_at:
            self._replace()

    def end(self) -> None:
        """Wait, for some seconds at most, until there is none."""
        for one in (self.exporter, self._lost):
            if one:
                one.end()
        self.exporter = self._lost = None

    def _use(self, exporter: Exporter) -> None:
        exporter.serve()
        self.exporter = exporter
        self._serving_since = self._ask_at = 0.0
        self._unanswered = 0

    def _ask(self, exporter: Exporter) -> None:
        longest = LONGEST_SILENCE if self._serving_since else LONGEST_START
        if self._unanswered == longest:
            self._lose(f"has said nothing for {longest * PING_SECONDS:g} s")
            exporter.kill()
            return
        self._unanswered += 1
        if self._serving_since:
            with contextlib.suppress(OSError):  # it has not read the last ones, or is gone
                exporter.control.send(PING)

    def _lose(self, why: str) -> None:
        if not self.exporter:
            return
        self.exporter.let_go()
        self.exporter, self._lost, self._why_lost = None, self.exporter, why
        if self._serving_since and time.monotonic() - self._serving_since > self._pause:
            self._pause = SHORTEST_PAUSE
        self._start_later()

    def _start_later(self) -> None:
        self._start_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _look_at_lost(self, exporter: Exporter, now: float) -> None:
        code = exporter.code()
        if code is None:
            if now < self._start_at:
                return
            exporter.kill()  # and another is started, whether this one can be killed or not
        why = "has closed its socket and goes on" if code is None else how_it_ended(code)
        self.trouble = self._why_lost or why
        self._lost = None
        if not self.has_served:
            kind = LockdError if code is None else error_of(code)
            raise kind(f"exporter: {self.trouble} before it served anything")

    def _replace(self) -> None:
        log.error("exporter: %s; starting another", self.trouble)
        try:
            self._use(self._start_another())
        except OSError as error:  # too many processes or descriptors: that may pass
            self.trouble = f"cannot be started: {error.strerror}"
            self._start_later()
        else:
            self.restarts += 1
