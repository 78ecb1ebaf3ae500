"""Log lines go where the process's stderr goes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = (
    "import logging, os, sys\n"
    "status = os.fstat(2)\n"
    "if sys.argv[1] == 'journal':\n"
    "    os.environ['JOURNAL_STREAM'] = f'{status.st_dev}:{status.st_ino}'\n"
    "from lockd import logs\n"
    "logs.setup('info', process='exporter')\n"
    "logging.getLogger('lockd.test').info('hello %s', 'world')\n"
    "logging.getLogger('lockd.test').debug('too much')\n"
    "print(type(logging.getLogger().handlers[0]).__name__)\n"
)


def run(argument: str, **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, argument],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip(), done.stderr


def test_plain_text_on_stderr() -> None:
    handler, said = run("text", JOURNAL_STREAM="1:2")  # somebody else's stream
    assert handler == "StreamHandler"
    assert re.fullmatch(r"\d\d:\d\d:\d\d info hello world\n", said)


def test_the_journal_if_stderr_is_its_stream() -> None:
    handler, said = run("journal")
    assert (handler, said) == ("JournalHandler", "")


def test_without_systemds_module(tmp_path: Path) -> None:
    (tmp_path / "systemd.py").write_text("raise ImportError\n")
    handler, said = run("journal", PYTHONPATH=str(tmp_path))
    assert handler == "StreamHandler"
    assert "hello world" in said


def test_what_clients_do_to_tornado_is_a_short_line_now_and_then() -> None:
    script = (
        "import logging\n"
        "from lockd import logs\n"
        "logs.setup('info', process='exporter')\n"
        "for _ in range(1000):\n"
        "    try:\n"
        "        int('non\\nsense', 16)\n"
        "    except ValueError:\n"
        "        logging.getLogger('tornado.general').error('Uncaught exception', exc_info=True)\n"
        "        logging.getLogger('tornado.application').error('Uncaught %s', 'one', exc_info=True)\n"
        "logging.getLogger('lockd.export').error('ours')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *theirs, ours = done.stderr.splitlines()
    assert ours.endswith(" error ours")
    assert "Uncaught exception: ValueError(" in theirs[0]
    assert "Uncaught one: ValueError(" in theirs[1]
    # A busy host may take seconds to log all of them, so that more than one of each comes through.
    assert 2 <= len(theirs) <= 10
    assert all(len(line) < 200 for line in theirs)
