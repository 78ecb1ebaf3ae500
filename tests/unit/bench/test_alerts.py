"""Tests of bench/alerts.py: the faults that it stages, and its judgment of alerts and expressions."""

from __future__ import annotations

from collections import defaultdict

import pytest

from bench.alerts import Seen, judged
from bench.expressions import OTHERS, Expression, Expressions
from bench.prometheus import RULES, Notified, Prometheus, faster, faster_rules
from bench.staged import OF_LOCKD, Alert, Fault, faults
from tests.support.watch_files import ALERTS, EXPRESSIONS, VARIABLES

HELD_BACK = "was sent after"
WARNING, CRITICAL = Alert("LockdX", "warning", "shop"), Alert("LockdX", "critical", "shop")


def fault(**how: tuple[Alert, ...]) -> list[Fault]:
    return [Fault("x", lambda stage: None, **{"sent": (), **how})]  # type: ignore[arg-type,return-value]


def notified(
    at: float, alert: Alert, is_firing: bool = True, began: str = "1", receiver: str = ""
) -> Notified:
    labels = {"alertname": alert.name, "severity": alert.severity, "comm": alert.whom}
    to = receiver or ("page" if alert.severity == "critical" else "default")
    return Notified(at, to, is_firing, labels, began)


def seen(alert: Alert, *sent: Notified, until: float = 9) -> dict[Alert, Seen]:
    return defaultdict(Seen, {alert: Seen(1.0, until, list(sent))})


def test_every_alert_is_staged() -> None:
    expected = {
        (alert.name, alert.severity)
        for fault in faults()
        for alert in (*fault.sent, *fault.held_back, *fault.later)
    }
    assert expected == {(rule["alert"], rule["labels"]["severity"]) for rule in ALERTS}


def test_faults_have_names_of_their_own() -> None:
    names = [fault.name for fault in faults()]
    assert len(names) == len({*names})
    assert {*OF_LOCKD} <= {*names}
    assert all(" " not in name for name in names), "they are in commands"


def test_what_is_sent_once_and_ends_is_right() -> None:
    one = seen(WARNING, notified(5, WARNING), notified(9, WARNING, False))
    assert judged(fault(sent=(WARNING,)), one, set()) == []
    held_back = defaultdict(Seen, {WARNING: Seen(1.0, 9.0)})
    assert judged(fault(held_back=(WARNING,)), held_back, set()) == []
    assert judged(fault(may=(WARNING,)), one, set()) == []


@pytest.mark.parametrize(
    ("how", "sent", "still", "says"),
    [
        ({"sent": (WARNING,)}, [], set(), "was not sent"),
        ({"sent": (WARNING,)}, [notified(5, WARNING)], set(), "did not end"),
        ({"held_back": (WARNING,)}, [], {WARNING}, "did not end"),
        ({"held_back": (WARNING,)}, [notified(5, WARNING), notified(9, WARNING, False)], set(), HELD_BACK),
        ({}, [notified(5, WARNING), notified(9, WARNING, False)], set(), "fired after"),
        (
            {"sent": (WARNING,)},
            [notified(5, WARNING), notified(6, WARNING, False), notified(7, WARNING, True, "2"),
             notified(9, WARNING, False, "2")],
            set(),
            "was sent as several",
        ),
        (
            {"sent": (WARNING,)},
            [notified(5, WARNING, receiver="page"), notified(9, WARNING, False)],
            set(),
            "was sent to another than default",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(
    how: dict[str, tuple[Alert, ...]], sent: list[Notified], still: set[Alert], says: str
) -> None:
    (wrong,) = judged(fault(**how), seen(WARNING, *sent), still)
    assert wrong.startswith("LockdX (warning) for shop") and says in wrong


def test_an_alert_that_never_fired_is_told() -> None:
    assert judged(fault(held_back=(WARNING,)), defaultdict(Seen), set()) == [f"{WARNING} did not fire"]


def test_what_is_held_back_may_be_sent_only_when_its_source_has_ended() -> None:
    both = seen(WARNING, notified(20, WARNING), notified(30, WARNING, False), until=30)
    both |= seen(CRITICAL, notified(5, CRITICAL), notified(15, CRITICAL, False), until=14)
    how = fault(sent=(CRITICAL,), later=(WARNING,))
    assert judged(how, both, set()) == []
    both[CRITICAL].firing_until = 21.0
    assert judged(how, both, set()) == [f"{WARNING} was sent while the critical one fired"]


@pytest.mark.parametrize(
    ("expr", "divided"),
    [
        ("rate(x[5m]) > 1", "rate(x[30s]) > 1"),
        ("deriv(x[2m])", "deriv(x[2m])"),
        ("rate(x[2m]) / rate(x[1h])", "rate(x[12s]) / rate(x[360s])"),
        ("x unless x offset 10m", "x unless x offset 60s"),
        ("a:x:rate5m", "a:x:rate5m"),
        ("sum_over_time(a:x:rate5m[1h:1m]) / 60", "sum_over_time(a:x:rate5m[360s:6s]) / 60"),
        ("sum_over_time(a:x:rate5m[6h:1m]) / 360", "sum_over_time(a:x:rate5m[1080s:3s]) / 360"),
    ],
)
def test_long_durations_are_divided(expr: str, divided: str) -> None:
    assert faster(expr, 10) == divided


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_rules_stay_as_they_are_but_for_durations(path) -> None:  # type: ignore[no-untyped-def]
    as_committed, divided = faster_rules(path, 1), faster_rules(path, 10)
    for before, after in zip(as_committed["groups"], divided["groups"], strict=True):
        for one, other in zip(before["rules"], after["rules"], strict=True):
            times = {"expr", "for"}
            assert {**one, **dict.fromkeys(times)} == {**other, **dict.fromkeys(times)}
            assert ("for" in one) == ("for" in other)


class Empty(Prometheus):
    """A Prometheus that has nothing stored."""

    def __init__(self) -> None:
        pass

    def asked(self, what: str, **query: object) -> object:
        return [] if what.startswith("label/") else {"resultType": "vector", "result": []}


def test_what_returns_nothing_without_a_reason_is_told() -> None:
    found = Expressions(Empty(), 10, 5, ["host"], {"lockd_kernel_lock_hold_": "cannot be measured"})
    found.look()
    asked = sum(1 for where, _ in EXPRESSIONS if not where.startswith("variable "))
    assert len(found.variables) == sum(variable["type"] == "query" for _, variable in VARIABLES)
    excused = [one for one in found.all if found.reason(one)]
    assert {found.reason(one) for one in excused} == {"cannot be measured", *OTHERS.values()}
    assert len(found.wrong()) == len(found.all) + len(found.variables) - len(excused)
    assert len(found.all) > asked
    assert "**it should not be empty**" in found.report()


def test_what_must_be_empty_and_is_not_is_told() -> None:
    found = Expressions(Empty(), 10, 5, ["host"], {})
    found.all, found.variables = [Expression("page", "kube_pod_info", 1)], []
    assert found.wrong() == ["page returned something, and cannot: kube_pod_info"]
