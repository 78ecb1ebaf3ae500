"""Where log lines go: to journald with structured fields, or to stderr as plain text."""

from __future__ import annotations

import logging
import os
import sys


def setup(level: str | int, process: str) -> None:
    """Send this process's log lines of `level` (such as "info") and above to their place."""
    if isinstance(level, str):
        level = level.upper()
    logging.basicConfig(level=level, handlers=[_journal(process) or _text()], force=True)
    # Tornado reports every malformed request; a port scan would fill the log.
    if logging.getLogger().level > logging.DEBUG:
        logging.getLogger("tornado.general").setLevel(logging.ERROR)


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
