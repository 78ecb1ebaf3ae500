"""Tests of what bench/services.py concludes from the alerts that fired."""

from __future__ import annotations

from typing import Any

import pytest

from bench.services import TRUE_CASES, failures

GOOD: dict[str, Any] = {
    "alerts": [],
    "units": ["redis.service", "stuck.service"],
    "levels": {"0": 1.0},
    "series": {},
    "ended": {},
    "log": [],
    "minutes": {"quiet": 30.0},
}


def alert(name: str, comm: str = "", unit: str = "", state: str = "firing") -> dict[str, Any]:
    return {"alertname": name, "alertstate": state, "comm": comm, "unit": unit, "after": 60.0, "seconds": 15}


TRUE = [alert(name, case.comm, f"{case.comm}.service") for case in TRUE_CASES for name in case.alerts]


def test_true_cases_are_right() -> None:
    assert failures({**GOOD, "alerts": TRUE}) == []
    assert failures({**GOOD, "alerts": TRUE[1:]}) == ["LockdDeadlock did not fire for deadlocked"]


@pytest.mark.parametrize(
    ("one", "whom"),
    [
        (alert("LockdLockWaitLong", "redis-server", "redis.service"), "redis-server"),
        (alert("LockdRunQueueLong", "", "redis.service"), "redis.service"),
        (alert("LockdTicksLate"), "lockd"),
    ],
)
def test_what_fires_for_a_service_or_for_lockd_is_wrong(one: dict[str, Any], whom: str) -> None:
    (wrong,) = failures({**GOOD, "alerts": [*TRUE, one]})
    assert wrong == f"{one['alertname']} fired for {whom} after 60 s, for 15 s"


@pytest.mark.parametrize(
    "one",
    [
        alert("LockdRunQueueLong", "", "somebodys.service"),
        alert("LockdRunQueueLong", "", "stuck.service"),
        alert("LockdTicksLate", state="pending"),
    ],
)
def test_others_and_what_does_not_fire_are_told_only(one: dict[str, Any]) -> None:
    assert failures({**GOOD, "alerts": [*TRUE, one]}) == []
