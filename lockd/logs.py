"""Where log lines go: to journald with structured fields, or to stderr as plain text."""

from __future__ import annotations

import logging
import os
import sys
import time

PAUSE = 10.0
"""Seconds between two lines of a library that says the same again and again."""


def setup(level: str | int, process: str) -> None:
    """Send this process's log lines of `level` (such as "info") and above to their place."""
    logging.basicConfig(handlers=[_journal(process) or _text()], force=True)
    for name in ("tornado.general", "tornado.application"):
        logging.getLogger(name).addFilter(Seldom())
    set_level(level)


def set_level(level: str | int) -> None:
    """Let log lines of `level` and above through from now on."""
    root = logging.getLogger()
    root.setLevel(level.upper() if isinstance(level, str) else level)
    # Tornado reports every malformed request; a port scan would fill the log.
    is_debugged = root.level <= logging.DEBUG
    logging.getLogger("tornado.general").setLevel(logging.NOTSET if is_debugged else logging.ERROR)


def open_journal() -> bool:
    """Whether lines go to the journal. Then its socket is open from now on, so that they still go there from
    a process that may open none. The library opens it for a line and not otherwise."""
    journal = [one for one in logging.getLogger().handlers if not isinstance(one, logging.StreamHandler)]
    for handler in journal:
        line = {
            "name": __name__,
            "levelno": logging.DEBUG,
            "levelname": "DEBUG",
            "msg": "confined from now on",
        }
        handler.handle(logging.makeLogRecord(line))
    return bool(journal)


class Seldom(logging.Filter):
    """Lets one message in ten seconds through, without its traceback, and says how many it did not.

    What tornado says comes of what clients send: who reaches the port must not be able to fill the log. At
    the level debug all is let through.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if logging.getLogger().level <= logging.DEBUG:
            return True
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return False
        says = record.getMessage()
        if record.exc_info:
            says += f": {record.exc_info[1]!r}"
        more = f" (and {self._left_out} others before)" if self._left_out else ""
        record.msg, record.args, record.exc_info = f"{says[:150]}{more}", None, None
        self._next, self._left_out = now + PAUSE, 0
        return True


def _text() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    return handler


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return super().format(record)


def _journal(process: str) -> logging.Handler | None:
    """journald's handler, if stderr is the journal's stream (see systemd.exec(5))."""
    try:
        status = os.fstat(sys.stderr.fileno())
        if os.environ.get("JOURNAL_STREAM") != f"{status.st_dev}:{status.st_ino}":
            return None
        from systemd.journal import JournalHandler  # type: ignore[import-untyped,unused-ignore]
    except (OSError, ValueError, AttributeError, ImportError):
        return None
    handler: logging.Handler = JournalHandler(SYSLOG_IDENTIFIER="lockd", LOCKD_PROCESS=process)
    handler.setFormatter(logging.Formatter("%(message)s"))  # the rest are fields
    return handler
