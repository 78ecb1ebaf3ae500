"""A changed configuration while lockd runs: what of it is taken, and how that went.

The file is taken wholly or, if anything in it is wrong, not at all. What only a restart can take stays as it
is, and is named; the rest is taken. The exporter reads the web configuration, a file of its own, by itself.
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
"""So long the exporter's answer is waited for: about as long as for a sign of life of it."""


@dataclass
class Merged:
    """What a file says beside what is in force, by the names of the keys."""

    taken: list[str] = field(default_factory=list)
    """Other than before, and taken."""
    waiting: list[str] = field(default_factory=list)
    """Other than what is in force, which stays until a restart."""

    def section(self, running: S, asked: S, above: str = "") -> S:
        """What is in force from now on."""
        values = {}
        for name, (field_name, about) in described(type(running)).items():
            was, now = getattr(running, field_name), getattr(asked, field_name)
            if isinstance(about, type):
                values[field_name] = self.section(was, now, f"{above}{name}.")
            elif was != now:
                (self.taken if about.reloads else self.waiting).append(above + name)
                values[field_name] = now if about.reloads else was
        return dataclasses.replace(running, **values)


class Reloads:
    """Reloads as they are asked for, one after another: look(), at each tick, goes on with them; never waits.

    `running` is in force. `read` gives what the file says now, and raises LockdError if it is wrong; `take`
    is for what is taken of it; `begins` and `ends` are called before and after.
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
        self._is_asked = False
        self._exporter: Exporter | None = None
        """Who has to answer before the reload ends."""
        self._is_told = False
        self._until = 0.0
        self.was_successful = True
        """The last one."""
        self.waiting: list[str] = []
        """The keys of which the file says something that only a restart can take."""

    def ask(self) -> None:
        """Have one done soon; to be called from a signal handler, or wherever."""
        self._is_asked = True

    def look(self, exporter: Exporter | None) -> None:
        """`exporter` is the one there is. Another began with what is in force, so that is not waited for."""
        if self._exporter and self._exporter is not exporter:
            self._end(True)
        if self._exporter and time.monotonic() > self._until:
            log.error("the exporter did not answer whether the web configuration is right")
            self._end(False)
        if self._exporter:
            self._tell(self._exporter)
        elif self._is_asked:
            self._is_asked = False
            self._begins()
            if not self._take_file():
                self._end(False)
            elif exporter:
                self._exporter, self._is_told = exporter, False
                self._until = time.monotonic() + ANSWER_SECONDS
                self._tell(exporter)
            else:
                self._end(True)

    def answered(self, message: bytes) -> None:
        """What the exporter says, whatever that is about."""
        if self._exporter and message in (RELOADED, NOT_RELOADED):
            self._end(message == RELOADED)

    def _take_file(self) -> bool:
        """Whether it is right."""
        try:
            asked = self._read()
        except LockdError as error:
            problems = "; ".join(str(error).splitlines())
            log.error("the configuration before this one stays in force: %s", problems)
            return False
        merged = Merged()
        if len(asked.windows) > self._most_windows:  # the lines that they take were kept at the start
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

    def _tell(self, exporter: Exporter) -> None:
        if not self._is_told:
            self._is_told = exporter.reload(self.running.log.level, self.running.budget.requests)

    def _end(self, is_success: bool) -> None:
        self._exporter = None
        self.was_successful = is_success
        self._ends()
