"""An exporter that hangs, fails or does not end is noticed, logged and replaced. Nobody waits for it."""

from __future__ import annotations

import operator
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockd.errors import LockdError
from lockd.service import exporter as exporters
from lockd.service.exporter import Exporter, Supervisor
from tests.support.hostile_exporter import SERVING, runs_instead

SECONDS = 60.0
TICK = 0.01
ALIVE = "while control.recv(64): control.send(b'alive')\n"


class Supervised:
    """A supervisor that looks at every tick, as in the daemon's loop, and when its exporters started."""

    def __init__(self) -> None:
        self.started: list[float] = []
        self.all: list[Exporter] = []
        self.supervisor = Supervisor(self._start, self._start())

    def _start(self) -> Exporter:
        self.started.append(time.monotonic())
        self.all.append(Exporter([], None, "info"))
        return self.all[-1]

    def tick(self) -> None:
        exporter = self.supervisor.exporter
        control = exporter.control if exporter else None
        if control and select.select([control], [], [], TICK)[0]:
            try:
                message = control.recv(64)
            except ConnectionResetError:  # it ended with a question unread, which counts as its end
                message = b""
            self.supervisor.handle_message(message)
        elif not control:
            time.sleep(TICK)
        self.supervisor.check_exporter()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {self.supervisor.trouble}"
            self.tick()

    def end(self) -> None:
        self.supervisor.end()
        for one in self.all:
            one.end()


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "PING_SECONDS", 0.05)
    monkeypatch.setattr(exporters, "LONGEST_SILENCE", 40)
    monkeypatch.setattr(exporters, "LONGEST_START", 1200)
    monkeypatch.setattr(exporters, "SHORTEST_PAUSE", 0.1)
    monkeypatch.setattr(exporters, "LONGEST_PAUSE", 0.5)


def is_there(exporter: Exporter) -> bool:
    return exporter.exit_code() is None


def test_one_that_hangs_is_killed_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporters, "LONGEST_SILENCE", 1200)  # on a busy host it answers late
    runs_instead(monkeypatch, tmp_path, SERVING + ALIVE)
    running = Supervised()
    try:
        running.until(lambda: running.supervisor.has_served)
        for _ in range(50):
            running.tick()
        running.until(lambda: running.supervisor._unanswered == 0)
        assert (running.supervisor.restarts, running.supervisor.trouble) == (0, ""), "it answers"
        monkeypatch.setattr(exporters, "LONGEST_SILENCE", 40)
        os.kill(running.all[-1].pid, signal.SIGSTOP)
        running.until(lambda: bool(running.supervisor.trouble))
        assert running.supervisor.trouble == "has said nothing for 2 s"
        assert not is_there(running.all[0])
        running.until(lambda: running.supervisor.restarts == 1 and not running.supervisor.trouble)
        assert running.all[0].exit_code() == -signal.SIGKILL
        assert "exporter: has said nothing for 2 s; starting another" in caplog.text
    finally:
        running.end()


def test_one_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(exporters, "SHORTEST_PAUSE", 1.0)
    runs_instead(monkeypatch, tmp_path, SERVING + "control.close()\ntime.sleep(300)\n")
    running = Supervised()
    try:
        running.until(lambda: running.supervisor.has_served)
        running.until(lambda: running.supervisor.exporter is None)
        running.supervisor.check_exporter()
        assert is_there(running.all[0]), "check_exporter() has come back before its end"
        running.until(lambda: running.supervisor.restarts == 1)
        running.until(lambda: running.all[0].exit_code() == -signal.SIGKILL)
    finally:
        running.end()


def test_one_that_fails_at_each_start_is_started_less_and_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs_instead(monkeypatch, tmp_path, SERVING + ALIVE)
    running = Supervised()
    try:
        running.until(lambda: running.supervisor.has_served)
        runs_instead(monkeypatch, tmp_path, "sys.exit(1)\n")
        os.kill(running.all[-1].pid, signal.SIGKILL)
        running.until(lambda: running.supervisor.restarts == 5)
        between = [
            later - earlier for earlier, later in zip(running.started, running.started[1:], strict=False)
        ]
        assert all(map(operator.ge, between, (0.1, 0.2, 0.4, 0.5, 0.5))), between
        running.until(lambda: running.supervisor.trouble == "ended with code 1")
        runs_instead(monkeypatch, tmp_path, SERVING + ALIVE)
        running.until(lambda: not running.supervisor.trouble)
        time.sleep(0.6)  # it serves for longer than any pause
        os.kill(running.all[-1].pid, signal.SIGKILL)
        restarts = running.supervisor.restarts
        running.until(lambda: running.supervisor.restarts == restarts + 1)
        assert running.supervisor._pause == 2 * exporters.SHORTEST_PAUSE, "the pause was the shortest again"
    finally:
        running.end()


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        ("sys.exit(2)\n", 2, "ended with code 2"),
        ("sys.exit(3)\n", 3, "ended with code 3"),
        ("sys.exit(1)\n", 1, "ended with code 1"),
        ("os.kill(os.getpid(), 9)\n", 1, "ended by SIGKILL"),
        ("control.close()\ntime.sleep(1)\nsys.exit(3)\n", 3, "ended with code 3"),
        ("time.sleep(300)\n", 1, "has said nothing for 1 s"),
    ],
)
def test_the_first_one_has_to_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, code: int, says: str
) -> None:
    """The exit code of the first exporter tells whether to start lockd again."""
    if "sleep(300)" in lines:
        monkeypatch.setattr(exporters, "LONGEST_START", 20)
    runs_instead(monkeypatch, tmp_path, lines)
    running = Supervised()
    try:
        with pytest.raises(LockdError, match=f"exporter: {says} before it served anything") as raised:
            running.until(lambda: False)
        assert raised.value.exit_code == code
    finally:
        running.end()


def test_a_pause_of_this_process_is_no_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs_instead(monkeypatch, tmp_path, SERVING + ALIVE)
    running = Supervised()
    try:
        running.until(lambda: running.supervisor.has_served)
        for _ in range(3):
            running.supervisor.check_exporter()
            time.sleep(1)  # three times: longer than the longest silence
        running.tick()
        assert not running.supervisor.trouble
    finally:
        running.end()


def test_the_end_takes_a_stopped_one_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(exporters, "ENDING_SECONDS", 0.2)
    runs_instead(monkeypatch, tmp_path, SERVING + ALIVE)
    running = Supervised()
    running.until(lambda: running.supervisor.has_served)
    os.kill(running.all[0].pid, signal.SIGSTOP)
    running.supervisor.end()
    assert running.all[0].exit_code() == -signal.SIGKILL
