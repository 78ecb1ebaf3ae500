"""Tests of the process of a single event: the event gets the same one as it would among many."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockd.names.labels.processes import Processes
from lockd.names.labels.units import Units
from lockd.sample.aggregates import identities
from lockd.sample.aggregates.identities import Filter, Identities
from tests.support.kernel_hold_host import WHO


def who(tgid: int, comm: bytes, cgroup: int = 5, thread: bytes = b"thread") -> Any:
    one = np.zeros(1, WHO)
    one["tgid"], one["comm"], one["cgroup"], one["thread_comm"] = tgid, comm, cgroup, thread
    return one


@pytest.fixture
def known(tmp_path: Path) -> Identities:
    return Identities(Processes(Units(tmp_path), tmp_path), Filter(exclude_comms=("cron",)))


def test_each_event_has_the_process_that_it_would_have_among_others(known: Identities) -> None:
    events = [
        who(7, b"shop"),
        who(8, b"cron"),
        who(7, b"web"),
        who(7, b"shop", thread=b"other"),
        who(9, b"shop"),
    ]
    for _ in range(2):
        for event in events:
            (number,) = known.numbers(event)
            assert known.identify_thread(event[0]) == (known.names[number], bool(known.is_wanted[number]))
    assert known.identify_thread(events[0][0]) == (("", "shop"), True)
    assert known.identify_thread(events[1][0]) == (("", "cron"), False)


def test_another_filter_holds_for_events_that_were_seen_before(known: Identities) -> None:
    event = who(8, b"cron")[0]
    assert not known.identify_thread(event)[1]
    known.set_filter(Filter())
    assert known.identify_thread(event)[1]


def test_an_event_without_a_name_has_the_one_that_its_process_has_now() -> None:
    known = Identities(Processes(Units()), Filter())
    renames_itself = ["sh", "-c", "while read name; do echo $name >/proc/$$/comm; echo; done"]
    process = subprocess.Popen(renames_itself, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    event = who(process.pid, b"", cgroup=0, thread=b"")[0]
    for comm in (b"first", b"second"):
        process.stdin.write(comm + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        known._processes.keep(set())  # the name is forgotten, as after a while
        assert known.identify_thread(event)[0][1] == comm.decode()
    process.communicate(timeout=10)


def test_what_is_remembered_has_a_bound(known: Identities, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "MAX_IDENTITIES", 10)
    for number in range(100):
        assert known.identify_thread(who(number, b"shop")[0]) == (("", "shop"), True)
        assert len(known._by_who) <= 10
