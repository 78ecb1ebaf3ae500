"""The names that lockd gives to the locks of real programs, against tests/programs/expected.py.

The run leaves tests/programs/build/results.json, from which tests/programs/table.py makes docs/lock-names.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.needs import absence
from tests.programs.expected import HOLD_US, ROUNDS, SCENARIOS, Scenario, agrees
from tests.support.lockd_process import CHECKOUT, Lockd, Metrics
from tests.support.workload import WITHOUT_DEBUG_FILES, Workload
from tests.tries import tries

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
BUILD = PROGRAMS / "build"
AT_ONCE = 6
"""The number of programs that run at a time. All of them need names at the same moment, and lockd holds a
wait back for the name of its lock for 5 s."""
SETTLED_SECONDS = 6.0
"""How long the expected names may take: a name may come a moment after the first wait."""
CALM_SECONDS = 60.0
COUNTED = "lockd_futex_lock_blocked_total"
SHORT_LIVED = "names_churn"
SHORT_LIVED_SHARE = 0.9
"""The least share of processes with a life of 30 ms whose lock gets a name."""
EXECUTED = "c.executed"
ONE_WORD = "rs.pl_both"
ONE_WORD_ROUNDS, ONE_WORD_HOLD_US = 36, 500_000
"""Rounds of ONE_WORD, and how long each wait lasts. They take 18 s: the word is captured again after ten."""
CPYTHON = "CPython"
"""The language whose programs may try again. lockd reads what their threads wait for from memory while they
wait, and may be too late for that on a busy host."""
CPYTHON_TRIES = 3
TOOLS = {
    "c": ("gcc", "g++"), "musl": ("musl-gcc",), "rust": ("cargo", "rustc"), "go": ("go",),
    "cgo": ("go", "gcc"), "java": ("javac", "jcmd"),
}  # fmt: skip
"""The tools that each target of the Makefile needs."""
KINDS = ("lock", "pi", "cond", "other")
WITHOUT_OTHER_WAITS = ("C, glibc", "C, stripped", "C++", "Rust")
"""Languages whose programs wait for nothing but the lock of their scenario. The runtimes of others have
threads that wait for work or for each other; with musl, a thread that starts waits for one that ends."""
NEW_THREADS = ("tls_own", "once", "guard")
"""Scenarios that start a new thread in each round, for which the C library takes locks of its own."""
IN_A_NAMESPACE = 'mount --bind "$0" "$1" && shift && exec "$@"'


@dataclass
class Said:
    """What lockd said of the lock of a scenario, and how many waits it counted for it."""

    comm: str
    """The comm of the process: that of the scenario, or another one in a further try."""
    kind: str = ""
    lock: str = ""
    site: str = ""
    stack: list[str] = field(default_factory=list)
    waits: int = 0
    told: int | None = None
    """The number of waits that the program itself counted, or that the scenario expects."""
    missing: str = ""
    """Why the scenario did not run."""


@pytest.fixture(scope="module")
def lockd(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """A daemon that looks at these programs alone. It runs where no debug files are installed, as they do."""
    comms = [*(one.comm for one in SCENARIOS), SHORT_LIVED, EXECUTED, ONE_WORD, "[0-9]py.*"]
    config = {"filter": {"comms": comms}, "series": {"top_locks": 1000, "max": 100_000}}
    program = [*WITHOUT_DEBUG_FILES, *CHECKOUT]
    daemon = Lockd(tmp_path_factory.mktemp("lockd"), config, program)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


@pytest.fixture(scope="module")
def said(lockd: Lockd, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """What lockd says of the lock of every scenario, by comm. AT_ONCE scenarios run at a time."""
    missing = {target: why_not_built(target) for target in {one.makes for one in SCENARIOS}}
    found = {one.comm: Said(one.comm, missing=missing[one.makes]) for one in SCENARIOS}
    runnable = [one for one in SCENARIOS if not missing[one.makes]]
    directory = tmp_path_factory.mktemp("programs")
    for first in range(0, len(runnable), AT_ONCE):
        group = runnable[first : first + AT_ONCE]
        found |= run(lockd, group, directory)
    for one in runnable:
        for number in tries(CPYTHON_TRIES):
            if number:
                again = replace(one, comm=f"{number}{one.comm}")
                found[one.comm] = run(lockd, [again], directory)[again.comm]
            if one.language != CPYTHON or is_right(one, found[one.comm]):
                break
    results = {comm: vars(one) for comm, one in found.items()}
    (BUILD / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return found


def is_right(one: Scenario, mine: Said) -> bool:
    is_named = mine.kind == one.kind and agrees(one.lock, mine.lock) and agrees(one.site, mine.site)
    return is_named and (one.waits is None or mine.waits == ROUNDS)


def why_not_built(target: str) -> str:
    """Build a target of the Makefile. Return what is missing for it, or an empty string."""
    if not target:
        return ""
    if reason := absence(*TOOLS[target]):
        return reason
    subprocess.run(["make", "-s", "-C", PROGRAMS, target], check=True)
    return ""


def run(lockd: Lockd, group: list[Scenario], directory: Path) -> dict[str, Said]:
    """Run these programs at the same time; return what lockd says of each once they have made their waits."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(group)) as pool:
        started = list(pool.map(lambda one: start(one, directory), group))
        for one in started:
            stack.callback(end, one)
        until_calm(lockd)
        mapped = {one.comm for one in group if one.where == "jcmd"}
        map_functions(lockd, [one for one in started if one.comm in mapped])
        for one in started:
            one.go()
        truths = {one.comm: one.truth() for one in started}
        lockd.metrics()
        with contextlib.suppress(AssertionError):  # the tests say what is wrong
            lockd.until(lambda metrics: all(is_as_expected(metrics, one) for one in group), SETTLED_SECONDS)
        metrics, rows = lockd.metrics(), lockd.api("locks", limit="1000")
    return {one.comm: what_was_said(one, metrics, rows, truths[one.comm]) for one in group}


def until_calm(lockd: Lockd) -> None:
    """Wait until every lock on which threads block is captured: a Java machine begins with hundreds."""
    deadline, before = time.monotonic() + CALM_SECONDS, -1.0
    while (missed := lockd.metrics().sum("lockd_stack_misses_total")) != before:
        assert time.monotonic() < deadline, "locks are never all known"
        before = missed


def map_functions(lockd: Lockd, machines: list[Workload]) -> None:
    """Have Java machines write perf maps. Wait until lockd has read them and has no more advice."""

    def advised(metrics: Metrics, machine: Workload) -> float:
        return metrics.sum("lockd_advised_processes", comm=machine.comm, advice="java")

    lockd.until(lambda metrics: all(advised(metrics, one) == 1 for one in machines), CALM_SECONDS)
    for one in machines:
        subprocess.run(["jcmd", str(one.pid), "Compiler.perfmap"], check=True, stdout=subprocess.DEVNULL)
    lockd.until(lambda metrics: not any(advised(metrics, one) for one in machines), CALM_SECONDS)


def start(one: Scenario, directory: Path) -> Workload:
    """Start the process of a scenario by a link to the program, which gives the process its comm.

    The scenario's `where` says what is special about the process.
    """
    program, *arguments = (part.format(build=BUILD, here=PROGRAMS) for part in one.command)
    own = directory / f"{one.comm}.d"
    own.mkdir()
    path = Path(shutil.which(program) or BUILD / program)
    if one.where in ("deleted", "replaced"):
        path = Path(shutil.copy2(path, own))
    elif one.where == "mount namespace":
        # Outside of the namespace, this path has another program, which lockd must not take for this one.
        shutil.copy2(BUILD / "names_cpp", own / program)
        path = own / program
    link = directory / one.comm
    link.symlink_to(path)
    before: list[str | Path] = [*WITHOUT_DEBUG_FILES]
    if one.where == "mount namespace":
        before += ["/usr/bin/unshare", "--mount", "sh", "-ec", IN_A_NAMESPACE, BUILD, own]
    elif one.where == "pid namespace":
        before += ["/usr/bin/unshare", "--pid", "--mount-proc", "--fork", "--kill-child"]
    name, *rest = [*before, link, *arguments]
    workload = Workload(str(name), *rest, comm=one.comm)
    if one.where == "deleted":
        path.unlink()
    elif one.where == "replaced":
        os.replace(shutil.copy2(BUILD / "names_cpp", own / "new"), path)
    return workload


def end(one: Workload) -> None:
    one.finish()
    Path(f"/tmp/perf-{one.pid}.map").unlink(missing_ok=True)


def is_as_expected(metrics: Metrics, one: Scenario) -> bool:
    return any(
        agrees(one.lock, labels["lock"]) and labels["kind"] == one.kind
        for labels in metrics.labels(COUNTED, comm=one.comm)
    )


def what_was_said(
    one: Scenario, metrics: Metrics, rows: Iterable[dict[str, Any]], truth: dict[str, Any]
) -> Said:
    """Return what lockd says of the process's lock that is most like the expected one.

    Of several locks that are equally like it, this is the one for which threads were blocked longest.
    """

    def likeness(row: dict[str, Any]) -> tuple[int, float]:
        like = [row["kind"] == one.kind, agrees(one.lock, row["lock"]), agrees(one.site, row["site"])]
        return sum(like), row["blocked_us"]

    mine = [row for row in rows if row["comm"] == one.comm and row["program"] == "futex"]
    row = max(mine, key=likeness, default={"kind": "", "lock": "", "site": "", "stack": []})
    waits = int(metrics.sum(COUNTED, comm=one.comm, kind=row["kind"], lock=row["lock"]))
    return Said(
        one.comm, row["kind"], row["lock"], row["site"], row["stack"], waits, truth.get("blocked", one.waits)
    )


@pytest.mark.parametrize("one", SCENARIOS, ids=lambda one: one.comm)
def test_kind_lock_and_site(one: Scenario, said: dict[str, Said]) -> None:
    mine = said[one.comm]
    if mine.missing:
        pytest.skip(mine.missing)
    assert mine.kind == one.kind, mine
    assert agrees(one.lock, mine.lock), mine
    assert agrees(one.site, mine.site), mine
    if one.waits is not None:
        assert mine.told == ROUNDS
        assert mine.waits == ROUNDS, mine


def test_kinds_are_corrected_in_all_metrics(lockd: Lockd, said: dict[str, Said]) -> None:
    """A lock whose calls look like a condition variable's, as a reader's do, is `cond` in no metric."""
    metrics = lockd.metrics()
    for one in SCENARIOS:
        if said[one.comm].missing or one.waits is None or one.where == "jcmd":
            continue
        mine = said[one.comm]
        by_kind = {
            kind: metrics.sum("lockd_futex_blocked_seconds_count", comm=mine.comm, kind=kind)
            for kind in KINDS
        }
        assert by_kind[one.kind] >= ROUNDS, (one.comm, by_kind)
        if one.kind in ("lock", "pi"):
            others = [kind for kind in KINDS if kind != one.kind]
            of_lock = [metrics.sum(COUNTED, comm=mine.comm, lock=mine.lock, kind=kind) for kind in others]
            assert not any(of_lock), (one.comm, others, of_lock)
            if one.language in WITHOUT_OTHER_WAITS:
                assert not any(by_kind[kind] for kind in others), (one.comm, by_kind)
                assert by_kind[one.kind] == ROUNDS or one.command[1] in NEW_THREADS, (one.comm, by_kind)
        labels = {"comm": mine.comm, "kind": one.kind}
        blocked = metrics.sum("lockd_futex_blocked_seconds_sum", **labels)
        assert blocked >= ROUNDS * HOLD_US / 1e6 * 0.9, one.comm


@pytest.mark.thorough("ten seconds of nothing else")
def test_processes_that_have_ended_soon_after(lockd: Lockd) -> None:
    """Processes that are gone before the sampler's next tick still have names for their locks."""
    if reason := why_not_built("c"):
        pytest.skip(reason)
    churn = [BUILD / SHORT_LIVED, "2000", "10"]
    truth = json.loads(subprocess.check_output(churn))
    metrics = lockd.metrics()
    told, named = truth["processes"], {"lock": f"{SHORT_LIVED}:churned_mutex", "kind": "lock"}
    assert metrics.sum("lockd_futex_blocked_seconds_count", comm=SHORT_LIVED, kind="lock") == told
    metrics = lockd.until(lambda metrics: metrics.sum(COUNTED, **named) >= told * SHORT_LIVED_SHARE, 10)
    assert metrics.sum(COUNTED, **named) <= told


def test_a_process_that_has_just_become_another_program(lockd: Lockd, tmp_path: Path) -> None:
    """Before its exec the process is a shell, which the filter leaves out."""
    if reason := why_not_built("c"):
        pytest.skip(reason)
    link = tmp_path / EXECUTED
    link.symlink_to(BUILD / "names_c")
    one = Workload("/bin/sh", "-c", 'sleep 2; exec "$0" read', link, comm=EXECUTED)
    assert one.run()["blocked"] == ROUNDS
    metrics = lockd.metrics()
    named = {"comm": EXECUTED, "lock": "names_c:rwlock", "kind": "lock"}
    assert metrics.sum(COUNTED, **named) == ROUNDS, metrics.labels(COUNTED, comm=EXECUTED)
    one.finish()


@pytest.mark.thorough("eighteen seconds of waits")
def test_a_thread_that_waits_for_different_locks_on_one_word(lockd: Lockd, tmp_path: Path) -> None:
    """A thread waits on the same word for a condition variable of parking_lot, and then for its mutexes."""
    if reason := why_not_built("rust"):
        pytest.skip(reason)
    link = tmp_path / ONE_WORD
    link.symlink_to(BUILD / "names_rust")
    one = Workload(str(link), "pl_both", ONE_WORD_ROUNDS, ONE_WORD_HOLD_US, comm=ONE_WORD)
    assert one.run()["blocked"] == ONE_WORD_ROUNDS
    first = {"comm": ONE_WORD, "kind": "cond", "lock": "names_rust:names_rust::wait_for_fast_delivery"}
    later = {"comm": ONE_WORD, "kind": "lock", "lock": "names_rust:names_rust::lock_fast_orders"}
    metrics = lockd.until(
        lambda metrics: metrics.sum(COUNTED, comm=ONE_WORD) == ONE_WORD_ROUNDS, SETTLED_SECONDS
    )
    assert metrics.sum(COUNTED, **first) >= 1, metrics.labels(COUNTED, comm=ONE_WORD)
    assert metrics.sum(COUNTED, **later) >= 8, metrics.labels(COUNTED, comm=ONE_WORD)
    assert metrics.sum(COUNTED, **first) + metrics.sum(COUNTED, **later) == ONE_WORD_ROUNDS
    one.finish()
