"""Signals end lockd without an error, and without the start of another exporter."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.lockd_process import CHECKOUT, PERIOD, ROOT, START_SECONDS, Lockd

pytestmark = pytest.mark.untimed

SECONDS = 20.0
PIPE_BYTES = 4096


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The two ends of a terminal: the keyboard's and the program's."""
    ends = os.openpty()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def lockd(tmp_path: Path, terminal: tuple[int, int]) -> Iterator[Lockd]:
    """A daemon in the foreground of a terminal."""
    daemon = Lockd(tmp_path, program=["setsid", "--ctty", *CHECKOUT], stdin=terminal[1])
    yield daemon
    if daemon.process.poll() is None:
        daemon.process.kill()
    daemon.process.wait()


def exporter_of(lockd: Lockd) -> int:
    return child_of(lockd.process.pid, b"lockd.export")


def child_of(daemon: int, module: bytes) -> int:
    """Return the id of the daemon's child that runs `module`."""
    found: list[int] = []

    def is_there() -> bool:
        # proc(5): a child may be missing in that list while another ends, as the loader does.
        pids = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
        found[:] = [int(pid) for pid in pids if module in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return len(found) == 1

    until(is_there, f"{module.decode()} is a child of process {daemon}")
    return found[0]


def state_of(pid: int) -> str:
    """Return the state of a process as the letter of proc(5), or an empty string if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends after the file was opened
        return ""


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {what}"
        time.sleep(0.02)


def pause(lockd: Lockd) -> None:
    """Stop the sampler for a while, so that the exporter is the first to notice anything."""
    lockd.process.send_signal(signal.SIGSTOP)
    until(lambda: state_of(lockd.process.pid) == "T", "the sampler stands still")


def where_it_is(pid: int) -> str:
    """Describe what the threads of a process that does not end do, and their children's states."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        call, place = ((task / name).read_text().strip() for name in ("syscall", "wchan"))
        children = (task / "children").read_text().split()
        states = [f"{child} {state_of(int(child))}" for child in children]
        lines.append(f"{task.name} {state_of(int(task.name))}: call {call}, in {place}; children {states}")
    return "\n".join(lines)


def check_end(lockd: Lockd, exporter: int) -> None:
    try:
        code = lockd.process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        where = where_it_is(lockd.process.pid)
        raise AssertionError(f"not ended within {SECONDS:g} s:\n{where}\n{''.join(lockd.log)}") from None
    assert code == 0, "".join(lockd.log)
    until(lambda: not state_of(exporter), "the exporter is gone")
    log = "".join(lockd.log)
    assert log.count("serving on") == 1
    assert "starting another" not in log
    assert " error " not in log
    assert "Traceback" not in log


def test_ctrl_c_reaches_the_sampler_alone(lockd: Lockd, terminal: tuple[int, int]) -> None:
    exporter = exporter_of(lockd)
    pause(lockd)
    os.write(terminal[0], b"\x03")
    time.sleep(1)
    until(lambda: state_of(exporter) == "S", "it waits to be ended")
    lockd.process.send_signal(signal.SIGCONT)
    check_end(lockd, exporter)
    assert any("SIGINT" in line for line in lockd.log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_exporter_that_ends_first_is_not_replaced(lockd: Lockd, number: signal.Signals) -> None:
    """The exporter may end first where a supervisor sends the signal to every process of a service."""
    exporter = exporter_of(lockd)
    pause(lockd)
    lockd.process.send_signal(number)
    os.kill(exporter, number)
    until(lambda: state_of(exporter) == "Z", "the exporter has ended")
    lockd.process.send_signal(signal.SIGCONT)
    check_end(lockd, exporter)


def test_a_signal_while_a_log_line_is_written_ends_it(tmp_path: Path) -> None:
    """The write of a log line takes as long as nobody reads from the other end of the pipe."""
    config = tmp_path / "lockd.yaml"
    config.write_text(f"period: {PERIOD}\n")
    reading, writing = os.pipe()
    words = [*CHECKOUT, "run", f"--config.file={config}", "--web.listen-address=127.0.0.1:0"]
    daemon = subprocess.Popen(words, cwd=ROOT, stderr=writing)
    log = b""
    try:
        while b"serving on" not in log:
            assert select.select([reading], [], [], START_SECONDS)[0], log.decode()
            log += os.read(reading, PIPE_BYTES)
        fill(writing)
        os.kill(child_of(daemon.pid, b"lockd.export"), signal.SIGKILL)  # the sampler logs this
        place = Path(f"/proc/{daemon.pid}/wchan")
        until(lambda: "pipe_write" in place.read_text(), "the sampler waits for room in the pipe")
        daemon.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # for the signal's handler to run, which shows only later
        os.close(writing)
        while select.select([reading], [], [], SECONDS)[0] and (data := os.read(reading, PIPE_BYTES)):
            log += data
        assert daemon.wait(SECONDS) == 0, log.decode()
        assert b"signal SIGTERM: ending" in log
        assert b"Traceback" not in log
    finally:
        daemon.kill()
        daemon.wait()
        os.close(reading)


def fill(pipe: int) -> None:
    """Fill a pipe until it has no room left. It is opened anew for this, so that others who write to it still
    wait for room."""
    with open(os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as own:
        while own.write(b"\n" * PIPE_BYTES):
            pass


def test_its_children_end_when_the_sampler_is_killed(lockd: Lockd) -> None:
    exporter, namer = exporter_of(lockd), child_of(lockd.process.pid, b"lockd.names")
    lockd.process.kill()
    assert lockd.process.wait(SECONDS) == -signal.SIGKILL
    until(lambda: not state_of(exporter), "the exporter is gone")
    until(lambda: not state_of(namer), "the namer is gone")
