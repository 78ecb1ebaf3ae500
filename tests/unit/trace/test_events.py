"""Events of ring buffers, and what `lockd trace signals` makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockd.kernel.rings import Ring
from lockd.trace.core.session import Session
from lockd.trace.probes import events

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
