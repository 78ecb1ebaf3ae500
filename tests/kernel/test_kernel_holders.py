"""The code that made threads wait for kernel locks, against the test module and a workload that know it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks import in_one_of_some_tries, until_names_come
from tests.support.lock_module import LockModule, Script, Turns
from tests.support.lock_scripts import HOLD_US, ROUNDS, scripts
from tests.support.lockd_process import Lockd, Metrics
from tests.support.mechanisms import Daemons, asked_for
from tests.support.pprof_decoder import Decoded
from tests.support.workload import NUMBERS, OURS, Start

POINTS = 0.03
"""How far a share may be from the truth."""
ELSEWHERE = 0.02
"""How much the share of holders that made nobody wait may exceed the true share of such time."""
SECONDS = 8
HOLDERS = "lockd_kernel_lock_holder_seconds_total"
CAUSES = "lockd_kernel_lock_cause_seconds_total"
REFUSED = "lockd_holder_refused_seconds_total"
NO_RELEASE = "(no release)"
BY_DEFAULT = "all programs"
WAYS = (
    BY_DEFAULT,
    *(
        pytest.param(way, marks=pytest.mark.thorough("another way to see the same switches and waits"))
        for way in ("alone", "slow paths")
    ),
)
"""How lockd sees switches and waits: with the programs that see switches anyway; with `kernel_locks` alone;
and with that alone by fentry on the slow paths of locks, without the tracepoints of lock contention."""
STORE_OWNERS = ("mutex", "rwsem")
"""The locks of the module that store the thread that holds them; an rwsem does if it is held for writing."""
LOCK_TYPES = {"mutex": "mutex", "rwsem": "rwsem_write", "semaphore": "semaphore"}

pytestmark = pytest.mark.timeout(1500)  # several daemons start at the same time


def _config(way: str) -> dict[str, Any]:
    off = {"enabled": False}
    locks = {"mechanism": "fentry" if way == "slow paths" else "auto"}
    return {
        "programs": {"futex": off, "offcpu": off, "kernel_locks": locks},
        "filter": {"comms": [OURS]},
        "profile": {"samples_per_second": 200},
        "series": {"top_locks": 1000},
    }


@pytest.fixture(scope="module")
def daemons(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, narrow: Lockd
) -> Iterator[Daemons]:
    """`narrow`, and a daemon for each other way that the tests of this run ask for."""
    others = sorted(asked_for(request, "way") - {BY_DEFAULT})
    daemons = Daemons(tmp_path_factory.mktemp("by"), others, _config, {BY_DEFAULT: narrow})
    yield daemons
    daemons.stop()


def new_comm() -> str:
    return f"kh{next(NUMBERS)}.{os.getpid():x}.h"


Seconds = Counter[str]
"""Seconds of waiting by the name of the holder's function, or by cause."""


def held(metrics: Metrics, comm: str, **labels: str) -> Seconds:
    """Return for how long each holder of a lock has made the threads called `comm` wait."""
    found = Seconds()
    for one in metrics.labels(HOLDERS, comm=comm, **labels):
        found[one["holder"]] += metrics.sum(HOLDERS, **one)
    return found


def causes(metrics: Metrics, comm: str, **labels: str) -> Seconds:
    """Return for how long the threads called `comm` have waited for a lock, by what its holder did."""
    found = Seconds()
    for one in metrics.labels(CAUSES, comm=comm, **labels):
        found[one["cause"]] += metrics.sum(CAUSES, **one)
    return found


@pytest.mark.parametrize("lock", LOCK_TYPES)
def test_the_code_that_made_threads_wait_is_found(lock: str, module: LockModule, daemons: Daemons) -> None:
    def attempt() -> list[str]:
        comm = new_comm()
        roles = {"holder": f"hold_in_turns {SECONDS * 1000} {lock}", "asker*3": f"ask {lock}"}
        before = {way: metrics.sum(REFUSED) for way, metrics in daemons.metrics().items()}
        truth = module.run(Script(roles), comm).turns
        off = []
        for way, metrics in daemons.metrics().items():
            refused = metrics.sum(REFUSED) - before[way]  # of the locks of any process
            found = held(metrics, comm, lock_type=LOCK_TYPES[lock], lock=f"lockd_test_{lock}")
            print(lock, way, truth, dict(found), f"{sum(found.values()):.3f} s, {refused:.3f} s refused")
            off += [f"{way}: {what}" for what in compare(lock, truth, found, refused)]
            did = causes(metrics, comm, lock_type=LOCK_TYPES[lock], lock=f"lockd_test_{lock}")
            print(dict(did))
            if way == BY_DEFAULT:
                assert did.total() == pytest.approx(found.total())
                if lock in STORE_OWNERS and did["unknown"] > (nobody(truth) + ELSEWHERE) * did.total():
                    off.append(f"what the holder did is unknown: {did}")
            else:
                assert not did, "nothing sees the switches of the holder"
        return off

    in_one_of_some_tries(attempt)


def nobody(truth: Turns) -> float:
    """Return the share of the waited time in which nobody held the lock."""
    return 1 - sum(truth.by_holder_ns.values()) / truth.waited_ns


def compare(lock: str, truth: Turns, found: Seconds, refused: float) -> list[str]:
    """Return words for each way in which the holders that lockd found are wrong."""
    total, of_holders_ns = sum(found.values()), sum(truth.by_holder_ns.values())
    named = {name: found[f"turn_{name}_{lock}"] for name in truth.by_holder_ns}
    all_named = sum(named.values())
    if not all_named:
        return [f"none of the holders in {found}"]
    off = [
        f"{name}: {named[name] / all_named:.3f}, not {waited_ns / of_holders_ns:.3f}"
        for name, waited_ns in truth.by_holder_ns.items()
        if abs(named[name] / all_named - waited_ns / of_holders_ns) > POINTS
    ]
    others = 1 - all_named / total
    if others > nobody(truth) + ELSEWHERE:
        off.append(f"others: {others:.3f}, not {nobody(truth):.3f}")
    if total > truth.waited_ns / 1e9 * (1 + POINTS):
        off.append(f"{total} s, not {truth.waited_ns} ns")
    if total + refused < of_holders_ns / 1e9 * (1 - POINTS):
        off.append(f"{total} s, not {of_holders_ns} ns")
    return off


def found_holders(script: Script, module: LockModule, daemons: Daemons) -> dict[str, Seconds]:
    """Run a script; return, by way, for how long each holder of a lock has made its threads wait.

    The script runs twice, and what the first run adds is left out: a release counts for a lock without a name
    if the name is not found in time. The threads end at once, mostly before lockd reads their samples.
    """
    comm = new_comm()
    module.run(script, comm)
    for lockd in daemons.running.values():
        lockd.waited_for(comm=comm)
    before = daemons.metrics()
    module.run(script, comm)
    after = daemons.metrics()
    return {way: held(metrics, comm) - held(before[way], comm) for way, metrics in after.items()}


GAVE_UP = [name for name in scripts() if name.startswith("gave up ")]


@pytest.mark.parametrize("name", GAVE_UP)
def test_signals_and_timeouts_blame_nobody(name: str, module: LockModule, daemons: Daemons) -> None:
    for way, found in found_holders(scripts()[name], module, daemons).items():
        assert list(found) == [NO_RELEASE], way
        assert found[NO_RELEASE] >= ROUNDS * 0.01, way


def test_a_thread_that_gives_up_and_lets_another_in_is_no_holder(
    module: LockModule, daemons: Daemons
) -> None:
    """A reader waits behind a writer that waits itself. When the writer is killed, it wakes the reader."""
    roles = {
        "first": f"down_read rwsem, asleep 2 rwsem, sleep {HOLD_US}, kill writer, called 0 rwsem, "
        f"sleep {HOLD_US}, up_read rwsem",
        "writer": "held 1 rwsem, down_write_killable rwsem",
        "second": "asleep 1 rwsem, down_read rwsem, up_read rwsem",
    }
    for way, found in found_holders(Script(roles, ROUNDS), module, daemons).items():
        assert list(found) == [NO_RELEASE], way
        assert found[NO_RELEASE] >= ROUNDS * HOLD_US / 1e6, way


def test_a_writer_that_becomes_a_reader_lets_readers_in(module: LockModule, daemons: Daemons) -> None:
    script = scripts()["downgraded before a reader"]
    for way, found in found_holders(script, module, daemons).items():
        assert set(found) <= {"downgrade", "do_step"}, way  # the compiler may have inlined downgrade()
        assert found.total() >= ROUNDS * HOLD_US / 1e6 * (1 - POINTS), way


HOLD_SECONDS = 0.02
NATIVE = {
    "mutex": ("pipe->mutex", r"pipe_write"),
    "rwsem_write": ("inode->i_rwsem", r"write|iterate_dir|getdents"),
}
"""By lock type, the lock of the workload and a pattern of the functions that hold it while others wait."""


@pytest.mark.parametrize("way", WAYS)
def test_holders_in_system_calls(way: str, daemons: Daemons, workload: Start, scratch: Path) -> None:
    lockd: Lockd = daemons[way]
    until_names_come(lockd, workload("kernel_locks", 1, 1000, scratch, comm=new_comm()))
    rounds = 20
    one = workload("kernel_locks", rounds, round(HOLD_SECONDS * 1e6), scratch, comm=new_comm())
    one.run()
    metrics = lockd.metrics()
    for lock_type, (lock, pattern) in NATIVE.items():
        found = held(metrics, one.comm, lock_type=lock_type, lock=lock)
        right = sum(seconds for site, seconds in found.items() if re.search(pattern, site))
        assert right >= (1 - ELSEWHERE) * found.total(), found
        assert right >= 0.5 * rounds * HOLD_SECONDS, found  # a sample of so few holds often lacks one
    if way == BY_DEFAULT:  # the holder writes to a pipe, and waits for a page there
        did = causes(metrics, one.comm, lock_type="mutex", lock=NATIVE["mutex"][0])
        assert did["pipe"] > did.total() / 2, did
        ready = did["runqueue"] + did["running"]  # once the page is there, by how busy the host is
        assert did["pipe"] + ready >= (1 - ELSEWHERE) * did.total(), did
    (row,) = [row for row in lockd.waited_for(comm=one.comm, kind="mutex") if row["holders"]]
    (holder,) = row["holders"]
    assert re.search(NATIVE["mutex"][1], holder["site"])
    assert holder["site"] in holder["stack"]
    assert holder["share"] == 1.0
    page = lockd.get(f"/flamegraph?program=kernel_locks&by=holder&comm={one.comm}").decode()
    assert holder["site"] in page
    profile = Decoded(lockd.get(f"/debug/pprof/holders?comm={one.comm}"))
    assert profile.within("waited")[holder["site"]] > 0
    one.finish()
