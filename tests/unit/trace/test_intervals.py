"""When the results of --interval are due."""

from __future__ import annotations

import time

import pytest

from lockd.trace.core.output import Intervals


def test_what_was_missed_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    intervals, endless = Intervals(1.0), Intervals(None)
    ended = []
    for now in (100.9, 101.0, 101.5, 102.1, 107.25, 107.3, 107.9, 108.0):
        if intervals.has_ended():
            ended.append(now)
        assert not endless.has_ended()
    assert ended == [101.0, 102.1, 107.25, 108.0]
