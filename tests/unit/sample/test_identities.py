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
from tests.support.small_procfs import Procfs


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


def test_a_process_that_has_ended_keeps_the_name_of_its_last_event(tmp_path: Path) -> None:
    """Both names come in the same fold, and procfs has none."""
    processes = Processes(Units(tmp_path), tmp_path)
    known = Identities(processes, Filter())
    events = [who(tgid, comm) for comm in (b"bash", b"make") for tgid in range(100, 150)]
    known.numbers(np.concatenate(events))
    assert {processes.comm(tgid) for tgid in range(100, 150)} == {"make"}


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


SERVICE = b"4:memory:/system.slice/%s.service\n0::/\n"
"""The cgroups of a process in a service of a host with cgroup v1, where the unified hierarchy is not used."""


def test_a_process_that_gets_the_id_of_another_one_has_its_own_unit(procfs: Procfs) -> None:
    """On such a host both have the same cgroup id, so that their events look alike."""
    known = Identities(Processes(Units(procfs.root), procfs.root), Filter())
    event, other = who(7, b"shop"), who(8, b"shop")
    procfs.add(7, b"shop", cgroup=SERVICE % b"first")
    procfs.add(8, b"shop", cgroup=SERVICE % b"other")
    (number,), _ = known.numbers(event), known.numbers(other)
    names, first = known.names, ("first.service", "shop")
    assert names[number] == first
    procfs.remove(7)
    known._processes.keep({8})
    known.keep({8})
    assert known.identify_thread(event[0])[0] == first, "events of its last moments come later"
    for _ in range(2):
        known._processes.keep({8})
        known.keep({8})
    procfs.add(7, b"shop", cgroup=SERVICE % b"second")
    assert known.identify_thread(event[0])[0] == ("second.service", "shop")
    (renewed,), (kept,) = known.numbers(event), known.numbers(other)
    assert known.names[renewed] == ("second.service", "shop")
    assert known.names[kept] == ("other.service", "shop")
    assert names[number] == known.names[number] == first, "rows that have the number may still be there"


def test_more_processes_than_there_is_room_for_at_first_are_kept_and_forgotten(procfs: Procfs) -> None:
    known = Identities(Processes(Units(procfs.root), procfs.root), Filter())
    events = np.concatenate([who(tgid, b"shop") for tgid in range(1, 1001)])
    before = known.numbers(events)
    for _ in range(2):
        known.keep(set(range(1, 501)))
    after = known.numbers(events)
    assert (before[:500] == after[:500]).all()
    assert not np.isin(after[500:], before).any()
