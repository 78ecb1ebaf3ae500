"""Tests of the sampler's loop beside an exporter that misbehaves: ticks go on, whatever the exporter does."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lockd.messages import SETTLED
from lockd.sample import loop as loop_module
from lockd.sample.loop import Loop
from lockd.sample.own_cost import TickTimes
from lockd.sample.sampler import WINDOWS, Sampler
from lockd.service.exporter import Exporter
from tests.support.hostile_exporter import SERVING, runs_instead

PERIOD_NS = 20_000_000
TICKS = 25
SECONDS = 60.0
BLOCK = b"m" * 100_000


class Ticking:
    """Stands for a sampler, which would need BPF, and counts the blocks that it is asked for."""

    def __init__(self) -> None:
        self.own_cost = SimpleNamespace(late=TickTimes(28), work=TickTimes(28), ticks=0)
        self.cpu_budget = SimpleNamespace(tick_periods=1)
        self.blocks = 0
        self.since_tick = 0
        self.most = 0
        """The largest number of blocks between two ticks."""
        self.wakeups: socket.socket | None = None
        self.asleep_until = 0.0
        """The result of sleep()."""

    def sleep(self) -> float:
        return self.asleep_until

    def awake(self) -> None:
        """A real sampler tells the programs."""

    def tick(self) -> None:
        self.own_cost.ticks += 1
        self.most, self.since_tick = max(self.most, self.since_tick), 0

    def metrics(self) -> bytes:
        self.blocks += 1
        self.since_tick += 1
        return BLOCK

    details = wait_stacks = metrics

    def begin_settling(self) -> int:
        return self.own_cost.ticks + WINDOWS

    def has_counted(self, tick: int) -> bool:
        return self.own_cost.ticks >= tick


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Exporter]]:
    """Return a function that starts an exporter which runs the given lines."""
    started: list[Exporter] = []

    def run(lines: str) -> Exporter:
        runs_instead(monkeypatch, tmp_path, lines)
        started.append(Exporter([], None, "info"))
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.end()


def ticks_beside(exporter: Exporter, last: bytes) -> tuple[Ticking, list[bytes]]:
    """Tick until the exporter has sent `last`, and TICKS times after that.

    Returns the sampler, and the messages of the exporter that are no requests.
    """
    sampler, said, left = Ticking(), list[bytes](), [TICKS]
    wakeup, _other = socket.socketpair()

    def each_tick() -> None:
        left[0] -= last in said
        if not left[0]:
            loop.stop()

    loop = Loop(cast("Sampler", sampler), PERIOD_NS, said.append, each_tick, wakeup)
    loop.control = exporter.control
    exporter.serve()
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), f"after {sampler.own_cost.ticks} ticks it has said {said}"
    return sampler, said


@pytest.mark.parametrize("request_", ["m", "d", "w", "s", "?"])
def test_a_flood_of_requests_whose_answers_nobody_reads(
    start: Callable[[str], Exporter], request_: str
) -> None:
    exporter = start(SERVING + f"while True: control.send({request_.encode()!r})\n")
    sampler, said = ticks_beside(exporter, b"serving")
    if request_ in "mdw":
        assert sampler.most == 1
        assert sampler.blocks < 10, "each of them would keep its memory"
    else:
        assert said.count(b"?") == (0 if request_ == "s" else len(said) - 1)
        assert len(said) <= loop_module.MESSAGES * (sampler.own_cost.ticks + 1)


def test_what_a_signal_asks_for_waits_for_no_tick() -> None:
    sampler, ticks = Ticking(), list[int]()
    wakeup, signals = socket.socketpair()

    def each_time() -> None:
        ticks.append(sampler.own_cost.ticks)
        if sampler.own_cost.ticks:
            loop.stop()

    loop = Loop(cast("Sampler", sampler), PERIOD_NS, lambda _: None, each_time, wakeup)
    signals.send(b"1")
    loop.run()
    assert ticks == [0, 1]


def test_what_cannot_wait_for_rare_ticks_is_done_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter is watched and answered, and a stop is taken at once, although no tick is due."""
    monkeypatch.setattr(loop_module, "LONGEST_PAUSE", 10_000_000)
    sampler, left = Ticking(), [20]
    wakeup, _other = socket.socketpair()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def each_time() -> None:
        left[0] -= 1
        if left[0] in (15, 10):
            theirs.send(b"m")
        if not left[0]:
            loop.stop()

    loop = Loop(cast("Sampler", sampler), 1_000_000_000_000, lambda _: None, each_time, wakeup)
    loop.control = ours
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert (thread.is_alive(), left, sampler.own_cost.ticks, sampler.blocks) == (False, [0], 1, 2)


@pytest.mark.parametrize("sender", ["program", "signal", "exporter"])
def test_a_sleep_is_ended_by_what_may_need_a_tick(sender: str) -> None:
    sampler = Ticking()
    wakeup, signals = socket.socketpair()
    sampler.wakeups, program = socket.socketpair()
    control, exporter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    senders = {"program": program, "signal": signals, "exporter": exporter}
    until = time.monotonic() + SECONDS

    def each_time() -> None:
        if sampler.asleep_until:
            loop.stop()
            return
        sampler.asleep_until = until
        threading.Timer(0.1, senders[sender].send, [b"1"]).start()

    loop = Loop(cast("Sampler", sampler), PERIOD_NS, lambda _: None, each_time, wakeup)
    loop.control = control
    loop.run()
    assert time.monotonic() < until


def test_everything_is_counted_for_an_exporter_that_ends_a_sleep() -> None:
    sampler = Ticking()
    sampler.asleep_until = time.monotonic() + SECONDS
    wakeup, signals = socket.socketpair()
    control, exporter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    exporter.settimeout(SECONDS / 2)
    loop = Loop(cast("Sampler", sampler), PERIOD_NS, lambda _: None, lambda: None, wakeup)
    loop.control = control
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    exporter.send(b"s")
    assert exporter.recv(64) == SETTLED
    loop.stop()
    signals.send(b"1")
    thread.join(SECONDS / 2)
    assert not thread.is_alive()


def test_no_sleep_delays_the_replacement_of_an_exporter() -> None:
    sampler = Ticking()
    sampler.asleep_until = time.monotonic() + SECONDS
    wakeup, _signals = socket.socketpair()

    def each_time() -> None:
        if sampler.own_cost.ticks == TICKS:
            loop.stop()

    loop = Loop(cast("Sampler", sampler), PERIOD_NS, lambda _: None, each_time, wakeup)
    loop.run()
    assert time.monotonic() < sampler.asleep_until


ASKS = """
def next_block():
    said = []
    while True:
        words, fds, _, _ = socket.recv_fds(control, 64, 1)
        if fds or words != b"settled":
            return said, words, fds
        said.append(words)
"""


def test_one_that_asks_and_reads_is_answered(start: Callable[[str], Exporter]) -> None:
    asks = """
for request in (b"m", b"d", b"w", b"m"):
    control.send(request)
    _, words, (fd,) = next_block()
    assert (words, os.fstat(fd).st_size) == (b"ok", 100_000)
control.send(b"all answered")
time.sleep(300)
"""
    ticks_beside(start(SERVING + ASKS + asks), b"all answered")


def test_no_answer_is_lost_by_one_that_reads_late(start: Callable[[str], Exporter]) -> None:
    """The exporter would wait for a lost answer for ever, and ask for nothing else."""
    asks = """
for _ in range(40): control.send(b"s")
control.send(b"m")
time.sleep(2)
settled, words, fds = next_block()
while len(settled) < 40: settled.append(control.recv(64))
assert (words, len(fds)) == (b"ok", 1)
assert settled == [b"settled"] * 40
control.send(b"all answered")
time.sleep(300)
"""
    ticks_beside(start(SERVING + ASKS + asks), b"all answered")


@pytest.mark.parametrize(
    ("where", "what", "code"),
    [(loop_module, "to_memfd", errno.EMFILE), (loop_module.socket, "send_fds", errno.ETOOMANYREFS)],
)
def test_an_answer_that_cannot_be_passed_is_refused_in_words(
    start: Callable[[str], Exporter], monkeypatch: pytest.MonkeyPatch, where: object, what: str, code: int
) -> None:
    """The exporter would wait for it for ever, and ask for nothing else."""

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(where, what, fails)
    asks = """
control.send(b"m")
_, words, fds = next_block()
control.send(words)
time.sleep(300)
"""
    _, said = ticks_beside(start(SERVING + ASKS + asks), f"no block: {os.strerror(code)}".encode())
    assert said[0] == b"serving"


def test_an_exporter_that_cannot_even_be_refused_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    monkeypatch.setattr(loop_module.socket, "send_fds", fails)
    ours, _theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while ours.send(b"x"):
            pass
    loop_module.Loop._send(ours, BLOCK)
    assert ours.recv(1) == b""
