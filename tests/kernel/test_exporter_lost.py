"""A real daemon whose exporter hangs or is killed goes on, says so, and serves again."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.test_signals import child_of, state_of, until
from tests.support.lockd_process import Lockd

pytestmark = pytest.mark.untimed

SOONER = """
import sys
from lockd import cli
from lockd.service import exporter
from lockd.service import systemd
exporter.PING_SECONDS, exporter.LONGEST_SILENCE = 0.5, 10
systemd.Systemd._notify_at_once = lambda self, text: print("told:", text, file=sys.stderr) is None
sys.exit(cli.main())
"""
"""A lockd that notices after 5 s, not 30, that its exporter hangs, and logs what it would tell systemd."""


@pytest.fixture
def lockd(host: None, tmp_path: Path) -> Iterator[Lockd]:
    daemon = Lockd(tmp_path, program=["/usr/bin/python3", "-c", SOONER])
    yield daemon
    if daemon.process.poll() is None:
        daemon.process.kill()
    daemon.process.wait()


def replaced(lockd: Lockd, exporter: int) -> None:
    """Wait until another exporter serves, and check that the process `exporter` is gone."""
    until(lambda: "".join(lockd.log).count("serving on") == 2, "another one serves")
    assert child_of(lockd.process.pid, b"lockd.export") != exporter
    assert not state_of(exporter)


def test_one_that_hangs(lockd: Lockd) -> None:
    """The exporter answers neither lockd nor the connections that wait for it. Ticks go on meanwhile."""
    exporter = child_of(lockd.process.pid, b"lockd.export")
    before = lockd.metrics().sum("lockd_ticks_total")
    os.kill(exporter, signal.SIGSTOP)
    host, port = lockd.address.rsplit(":", 1)
    waiting = [socket.create_connection((host, int(port))) for _ in range(20)]
    for one in waiting:
        one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    replaced(lockd, exporter)
    after = lockd.metrics()
    for one in waiting:
        one.close()
    log = "".join(lockd.log)
    assert "exporter: has said nothing for 5 s; starting another" in log
    assert "told: STATUS=sampling; no metrics are served, exporter: has said nothing for 5 s" in log
    assert after.sum("lockd_exporter_restarts_total") == 1
    assert after.sum("lockd_ticks_total") - before > 20
    assert lockd.stop() == 0


def test_one_that_is_killed(lockd: Lockd) -> None:
    exporter = child_of(lockd.process.pid, b"lockd.export")
    os.kill(exporter, signal.SIGKILL)
    replaced(lockd, exporter)
    assert "exporter: ended by SIGKILL; starting another" in "".join(lockd.log)
    until(lambda: "told: STATUS=sampling; metrics on" in "".join(lockd.log), "the status is good again")
    assert lockd.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_is_stopped_does_not_outlive_the_daemon(lockd: Lockd, number: signal.Signals) -> None:
    exporter = child_of(lockd.process.pid, b"lockd.export")
    os.kill(exporter, signal.SIGSTOP)
    lockd.process.send_signal(number)
    assert lockd.process.wait(20) == (0 if number == signal.SIGTERM else -number)
    until(lambda: state_of(exporter) in ("", "Z"), "the exporter is gone")
    host, port = lockd.address.rsplit(":", 1)

    def is_free() -> bool:
        try:
            socket.create_server((host, int(port))).close()
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
            return False
        return True

    # A namer that is just being started has the descriptors of its parent until it executes its program.
    until(is_free, "the port is free")
