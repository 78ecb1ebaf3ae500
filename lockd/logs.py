"""Log lines go to journald with structured fields, or else to stderr as plain text."""

from __future__ import annotations

import logging
import os
import sys
import time

PAUSE = 10.0
"""The least seconds between two logged messages of one logger of tornado. Clients can cause such messages
without end."""


def setup(level: str | int, process: str) -> None:
    """Set up the log of this process. `level`, such as "info", is the lowest severity that is logged.

    `process` is the name of the process for the field LOCKD_PROCESS of the journal.
    """
    logging.basicConfig(handlers=[_journal(process) or _text()], force=True)
    for name in ("tornado.general", "tornado.application"):
        logging.getLogger(name).addFilter(RateLimit())
    set_level(level)


def set_level(level: str | int) -> None:
    """Log lines of the severity `level` and above from now on."""
    root = logging.getLogger()
    root.setLevel(level.upper() if isinstance(level, str) else level)
    # Tornado reports every malformed request; a port scan would fill the log.
    is_debugged = root.level <= logging.DEBUG
    logging.getLogger("tornado.general").setLevel(logging.NOTSET if is_debugged else logging.ERROR)


def open_journal() -> bool:
    """Open the journal's socket if log lines go to the journal. Returns whether they do.

    Once its filter of system calls is in force, a process cannot open this socket any more. The journal's
    library opens the socket when it sends the first line, so one line is sent here.
    """
    handlers = logging.getLogger().handlers
    journal = [handler for handler in handlers if not isinstance(handler, logging.StreamHandler)]
    for handler in journal:
        line = {
            "name": __name__,
            "levelno": logging.DEBUG,
            "levelname": "DEBUG",
            "msg": "confined from now on",
        }
        handler.handle(logging.makeLogRecord(line))
    return bool(journal)


class RateLimit(logging.Filter):
    """Lets one message of a logger pass every ten seconds, without its traceback, and with the number of
    messages left out before.

    Clients cause tornado's messages: whoever reaches the port must not be able to fill the log. At the level
    debug every message passes unchanged.
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
        message = record.getMessage()
        if record.exc_info:
            message += f": {record.exc_info[1]!r}"
        more = f" (and {self._left_out} others before)" if self._left_out else ""
        record.msg, record.args, record.exc_info = f"{message[:150]}{more}", None, None
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
    """A handler for the journal if stderr is connected to the journal (see systemd.exec(5)); else None."""
    try:
        status = os.fstat(sys.stderr.fileno())
        if os.environ.get("JOURNAL_STREAM") != f"{status.st_dev}:{status.st_ino}":
            return None
        from systemd.journal import JournalHandler
    except (OSError, ValueError, AttributeError, ImportError):
        return None
    handler: logging.Handler = JournalHandler(SYSLOG_IDENTIFIER="lockd", LOCKD_PROCESS=process)
    handler.setFormatter(logging.Formatter("%(message)s"))  # severity and time are fields of the entry
    return handler
