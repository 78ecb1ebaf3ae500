"""`lockd top` live, on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.top_daemon import PYTHON, ROOT, SECOND, Daemon, serving, thread


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving() as daemon:
        yield daemon


class Terminal:
    """`lockd top` on a pseudo-terminal of its own, and all that it wrote there."""

    def __init__(self, *args: str, rows: int = 24, columns: int = 120, term: str = "xterm") -> None:
        self.text = ""
        command = [PYTHON, "-m", "lockd", "top", "--interval=100ms", *args]
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
            os.execve(PYTHON, command, environment | {"TERM": term})
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, words: str) -> str:
        """Return what was written before `words`, once they are there; they may be there already."""
        end = time.monotonic() + 60
        while words not in self.text:
            assert time.monotonic() < end, f"{words!r} not in {self.text!r}"
            if select.select([self.fd], [], [], 1)[0]:
                self.text += os.read(self.fd, 65536).decode()
        before, _, self.text = self.text.partition(words)
        return before

    def end(self) -> tuple[int, str]:
        """Wait for the end of the program; return its exit code and the output that was not read yet."""
        rest = self.text
        while True:
            try:
                rest += os.read(self.fd, 65536).decode()
            except OSError:  # EIO: the program has closed its end
                os.close(self.fd)
                return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), rest


OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


def test_live_until_ctrl_c(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(blocked_us=n * 250_000, blocked_count=n)]
    terminal = Terminal(f"--url={daemon.url}")
    terminal.wait_for(OTHER_SCREEN)
    terminal.wait_for("measuring ...")
    terminal.wait_for("250.0ms")
    terminal.wait_for("worker[11]")
    terminal.wait_for("worker[11]")  # and again
    os.write(terminal.fd, b"\x03")
    code, rest = terminal.end()
    assert code == 0
    assert FIRST_SCREEN in rest
    assert "Traceback" not in rest and "KeyboardInterrupt" not in rest


def test_ctrl_c_before_the_daemon_answers(daemon: Daemon) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def threads(look: int) -> list[dict[str, Any]]:
        is_asked.set()
        may_answer.wait(60)
        return []

    daemon.threads = threads
    terminal = Terminal(f"--url={daemon.url}")
    assert is_asked.wait(60)
    os.write(terminal.fd, b"\x03")
    code, text = terminal.end()
    may_answer.set()
    assert code == 130
    assert OTHER_SCREEN not in text and "Traceback" not in text


def test_live_gives_the_screen_back_when_ended(daemon: Daemon) -> None:
    terminal = Terminal(f"--url={daemon.url}")
    terminal.wait_for("nothing blocked")
    os.kill(terminal.pid, signal.SIGTERM)
    code, rest = terminal.end()
    assert code == 128 + signal.SIGTERM
    assert FIRST_SCREEN in rest


def test_live_goes_on_while_the_daemon_restarts(daemon: Daemon) -> None:
    # After its restart the daemon counts from 0: a count that is less than before is all new.
    daemon.threads = lambda n: [
        thread(blocked_count=1000 + n if n < 5 else n, blocked_us=100 * SECOND if n < 5 else SECOND)
    ]
    terminal = Terminal(f"--url={daemon.url}", "--sort=max")
    terminal.wait_for("worker[11]")
    daemon.answer = (503, {}, b"")
    terminal.wait_for("answered 503")
    terminal.wait_for("worker[11]")  # the last numbers stay
    daemon.answer = None
    while "answered 503" in terminal.wait_for("lockd top"):
        pass
    os.write(terminal.fd, b"\x03")
    assert terminal.end()[0] == 0


def test_live_follows_the_size_of_the_terminal(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(tid, blocked_us=n * tid) for tid in range(100, 200)]
    terminal = Terminal(f"--url={daemon.url}", rows=20, columns=100)
    terminal.wait_for("worker[199]")
    terminal.wait_for("lockd top")
    frame = terminal.wait_for("lockd top")
    assert frame.count("worker[") == 6
    assert "UNIT" not in frame
    terminal.resize(40, 160)
    terminal.wait_for("UNIT")
    terminal.wait_for("lockd top")
    frame = terminal.wait_for("lockd top")
    assert frame.count("worker[") == 16
    assert "UNIT" in frame
    os.write(terminal.fd, b"\x03")
    assert terminal.end()[0] == 0


def test_no_daemon_on_a_terminal_leaves_the_screen_alone(daemon: Daemon) -> None:
    daemon.close()
    code, text = Terminal(f"--url={daemon.url}").end()
    assert code == 1
    assert "start it with: lockd run" in text
    assert OTHER_SCREEN not in text


@pytest.mark.parametrize(("flags", "term"), [(["--once"], "xterm"), ([], "dumb")])
def test_once_on_a_terminal(daemon: Daemon, flags: list[str], term: str) -> None:
    daemon.threads = lambda n: [thread(blocked_us=n * SECOND)]
    code, text = Terminal(f"--url={daemon.url}", *flags, term=term).end()
    assert code == 0
    assert "worker[11]" in text
    assert OTHER_SCREEN not in text
