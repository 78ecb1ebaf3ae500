"""Reloads of the configuration while lockd runs.

A configuration file with any mistake is refused as a whole. Of a correct file, the keys that a running daemon
can change take effect; the other changed keys are logged and wait for a restart. The exporter reads the web
configuration, which is a file of its own, by itself.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lockd.config.reader import Section, described
from lockd.config.schema import Config
from lockd.errors import LockdError
from lockd.messages import NOT_RELOADED, RELOADED
from lockd.service.exporter import Exporter

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Section)

ANSWER_SECONDS = 30.0
"""Seconds to wait for the exporter's answer: about as long as for its sign of life."""


@dataclass
class Merged:
    """Compares the configuration of a file with the one in force. Keys are given by their dotted names."""

    taken: list[str] = field(default_factory=list)
    """Changed keys that take effect at once."""
    waiting: list[str] = field(default_factory=list)
    """Changed keys that wait for a restart."""

    def section(self, running: S, asked: S, above: str = "") -> S:
        """The section `running` with the changes in `asked` that take effect at once.

        Adds the changed keys to `taken` and `waiting`, with the names of the sections `above` in front.
        """
        values = {}
        for name, (field_name, about) in described(type(running)).items():
            old, new = getattr(running, field_name), getattr(asked, field_name)
            if isinstance(about, type):
                values[field_name] = self.section(old, new, f"{above}{name}.")
            elif old != new:
                (self.taken if about.reloads else self.waiting).append(above + name)
                values[field_name] = new if about.reloads else old
        return dataclasses.replace(running, **values)


class Reloads:
    """Carries out reloads, one after another, in small steps at each tick. No step waits for anything.

    `running` is the configuration in force. `read` reads the file again, and raises LockdError if it is
    wrong; `take` gets the configuration that is in force from then on. `begins` and `ends` are called at the
    beginning and at the end of each reload.
    """

    def __init__(
        self,
        running: Config,
        read: Callable[[], Config],
        take: Callable[[Config], None],
        begins: Callable[[], None],
        ends: Callable[[], None],
    ) -> None:
        self.running = running
        self._most_windows = len(running.windows)
        self._read, self._take, self._begins, self._ends = read, take, begins, ends
        self._is_requested = False
        self._exporter: Exporter | None = None
        """The exporter whose answer the current reload waits for; None if it waits for none."""
        self._is_sent = False
        """Whether the current reload has been sent to `_exporter`."""
        self._until = 0.0
        """When the exporter must have answered, by the monotonic clock in seconds."""
        self.was_successful = True
        """Whether the last reload succeeded."""
        self.waiting: list[str] = []
        """The changed keys that wait for a restart."""

    def request(self) -> None:
        """Request a reload. May be called from a signal handler."""
        self._is_requested = True

    def advance(self, exporter: Exporter | None) -> None:
        """Go on with the current reload, or begin the one that was requested.

        `exporter` is the running exporter, if there is one. If the exporter whose answer is awaited runs no
        more, the reload is over: the next exporter begins with the configuration in force.
        """
        if self._exporter and self._exporter is not exporter:
            self._end(True)
        if self._exporter and time.monotonic() > self._until:
            log.error("the exporter did not answer whether the web configuration is right")
            self._end(False)
        if self._exporter:
            self._send_to(self._exporter)
        elif self._is_requested:
            self._is_requested = False
            self._begins()
            if not self._take_file():
                self._end(False)
            elif exporter:
                self._exporter, self._is_sent = exporter, False
                self._until = time.monotonic() + ANSWER_SECONDS
                self._send_to(exporter)
            else:
                self._end(True)

    def handle_message(self, message: bytes) -> None:
        """Handle any message of the exporter; only answers to a reload have an effect."""
        if self._exporter and message in (RELOADED, NOT_RELOADED):
            self._end(message == RELOADED)

    def _take_file(self) -> bool:
        """Read the file, and take what can be taken. Returns whether the file is correct."""
        try:
            asked = self._read()
        except LockdError as error:
            problems = "; ".join(str(error).splitlines())
            log.error("the configuration before this one stays in force: %s", problems)
            return False
        merged = Merged()
        # /metrics has lines reserved for as many windows as there were at the start of lockd.
        if len(asked.windows) > self._most_windows:
            merged.waiting.append("windows")
            asked = dataclasses.replace(asked, windows=self.running.windows)
        self.running, self.waiting = merged.section(self.running, asked), merged.waiting
        self._take(self.running)
        changed = ", ".join(merged.taken) or "nothing that can be taken now"
        log.info("the configuration was read again; changed: %s", changed)
        if merged.waiting:
            keys = ", ".join(merged.waiting)
            log.warning("%s: %s effect at a restart", keys, "take" if len(merged.waiting) > 1 else "takes")
        return True

    def _send_to(self, exporter: Exporter) -> None:
        if not self._is_sent:
            self._is_sent = exporter.reload(self.running.log.level, self.running.budget.requests)

    def _end(self, is_success: bool) -> None:
        self._exporter = None
        self.was_successful = is_success
        self._ends()
