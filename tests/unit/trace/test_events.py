"""Events of ring buffers, and what `lockd trace signals` makes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lockd.kernel.rings import Ring
from lockd.trace.core.session import Session
from lockd.trace.probes import events, signals

NUMBERS = (1, 2, 3)


class Overwritten:
    """A reader of a ring in which each record is overwritten by the next one, once that is asked for."""

    def __init__(self, ring: Ring) -> None:
        self._memory = bytearray(8)

    def records(self) -> Iterator[memoryview]:
        for number in NUMBERS:
            self._memory[:] = number.to_bytes(8, "little")
            yield memoryview(self._memory)


def session_of(layout: Any) -> Session:
    maps = [SimpleNamespace(name="ring", entries=4096), SimpleNamespace(name="record", value=layout)]
    return cast("Session", SimpleNamespace(manifest=SimpleNamespace(maps=maps), fds={"ring": -1}))


def test_a_record_is_read_before_its_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "RingReader", Overwritten)
    reader = events.EventReader(session_of("u8"), "ring", "record")
    assert reader.read().tolist() == list(NUMBERS)


SENT = np.dtype(
    [("at", "u8"), *((name, "u4") for name in ("running_tgid", "running_tid", "tgid", "tid")),
     *((name, "i4") for name in ("number", "code", "result")), ("to_process", "u2"), ("is_queueing", "u2"),
     ("running_comm", "S16"), ("comm", "S16")]
)  # fmt: skip
"""A record of the ring, as struct signal_sent of lockd/bpf/trace/signals.bpf.c."""
BY_PROCESS, BY_KERNEL = 0, 0x80
HOUR_NS = 3600 * 10**9


def signals_of(rows: Any, monkeypatch: pytest.MonkeyPatch, *pids: int) -> signals.Reader:
    monkeypatch.setattr(signals, "EventReader", lambda *_: SimpleNamespace(read=lambda: np.array(rows, SENT)))
    return signals.Reader(cast("Session", None), pids)


def test_a_signal_is_of_a_process_that_sends_or_receives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal is not of a process that was only interrupted when the kernel sent it to another process."""
    rows = [
        (at, running, running, receiver, receiver, 15, code, 0, 1, 0, b"a", b"b")
        for at, (running, receiver, code) in enumerate(
            [(7, 8, BY_PROCESS), (8, 7, BY_PROCESS), (9, 7, BY_KERNEL), (7, 9, BY_KERNEL), (8, 9, BY_PROCESS)]
        )
    ]
    found = [(one.sender_pid, one.pid) for one in signals_of(rows, monkeypatch, 7).read()]
    assert found == [(7, 8), (8, 7), (0, 7)]
    assert len(signals_of(rows, monkeypatch).read()) == len(rows)


@pytest.mark.parametrize(
    ("code", "is_queueing", "sender"),
    [(-60, 1, 7), (-99, 1, 7), (-2, 1, 7), (-4, 1, 7), (0x80, 1, 7), (-60, 0, 7), (-99, 0, 7), (-2, 0, 0),
     (-4, 0, 0), (-5, 0, 0), (-7, 0, 0), (0x80, 0, 0), (-6, 0, 7)],
)  # fmt: skip
def test_a_process_can_send_signals_with_any_code(
    code: int, is_queueing: int, sender: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(0, 7, 7, 8, 8, 40, code, 0, 1, is_queueing, b"a", b"b")]
    assert [one.sender_pid for one in signals_of(rows, monkeypatch).read()] == [sender]
    assert len(signals_of(rows, monkeypatch, 7).read()) == bool(sender)


def test_times_follow_a_clock_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(time.monotonic_ns(), 7, 7, 8, 8, 15, BY_PROCESS, 0, 1, 0, b"a", b"b")]
    reader = signals_of(rows, monkeypatch)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + HOUR_NS)
    (sent,) = reader.read()
    assert datetime.fromisoformat(sent.time).timestamp() == pytest.approx((now + HOUR_NS) / 1e9, abs=60)
