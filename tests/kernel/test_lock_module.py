"""Every mechanism and mode against the kernel test module, whose locks are known to the last one.

The daemons of all mechanisms run at the same time, so that they see the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lock_module import LOCK_TYPES, LockModule, Truth
from lock_scripts import CROWDS, scripts
from lockd_process import Lockd, Metrics, lockd_or_reason

WAITS, WAITED = "lockd_kernel_lock_wait_seconds_count", "lockd_kernel_lock_wait_seconds_sum"
MAX_WAIT = "lockd_kernel_lock_max_wait_us"
TAKEN = "lockd_kernel_lock_acquisitions_total"
HOLDS, HELD = "lockd_kernel_lock_hold_seconds_count", "lockd_kernel_lock_hold_seconds_sum"

WAYS = {
    "contention by tracepoint": ("contention", "tracepoint"),
    "contention by fentry": ("contention", "fentry"),
    "contention by kprobe": ("contention", "kprobe"),
    "all by auto": ("all", "auto"),
    "all by fentry": ("all", "fentry"),
    "all by kprobe": ("all", "kprobe"),
}
SHARE, EACH_US = 0.05, 500
"""Times may be off by so much, or by so much for each of the waits or holds."""
TRIES = 3
"""Of times: an emulated machine may stand still between the module's clock and lockd's."""

pytestmark = pytest.mark.timeout(900)  # six daemons start at the same time


class Bench:
    """The module, a daemon for each way that this kernel offers, and the scripts that were run so far."""

    def __init__(self, directory: Path) -> None:
        self.module = LockModule()
        with ThreadPoolExecutor(len(WAYS)) as pool:
            started = pool.map(lambda way: _start(directory / way, *WAYS[way]), WAYS)
        self._daemons = dict(zip(WAYS, started, strict=True))
        self._scripts = {**scripts(), **CROWDS}
        self._truths: dict[str, Truth] = {}
        self._seen: dict[str, tuple[int, Metrics]] = {}

    def daemon(self, way: str) -> Lockd:
        """Skips where this kernel does not offer that way."""
        daemon = self._daemons[way]
        if isinstance(daemon, str):
            pytest.skip(f"host: {daemon}")
        return daemon

    def running(self) -> dict[str, Lockd]:
        return {way: daemon for way, daemon in self._daemons.items() if isinstance(daemon, Lockd)}

    def result(self, name: str, attempt: int) -> tuple[str, Truth]:
        """A run of that script: the name of its threads, and the truth. It is run once for all ways."""
        if not attempt and not self._truths:
            for one in scripts():
                self._run(one, 0)
        comm = self._comm(name, attempt)
        if comm not in self._truths:
            self._run(name, attempt)
        return comm, self._truths[comm]

    def metrics(self, way: str) -> Metrics:
        """With all that has been run."""
        runs = len(self._truths)
        if self._seen.get(way, (-1,))[0] != runs:
            self._seen[way] = runs, self.daemon(way).metrics()
        return self._seen[way][1]

    def end(self) -> None:
        codes = [daemon.stop() for daemon in self.running().values()]
        self.module.unload()
        assert codes == [0] * len(codes)

    def _run(self, name: str, attempt: int) -> None:
        comm = self._comm(name, attempt)
        self._truths[comm] = self.module.run(self._scripts[name], comm)

    def _comm(self, name: str, attempt: int) -> str:
        return f"lt{list(self._scripts).index(name)}.{attempt}"


def _start(directory: Path, mode: str, mechanism: str) -> Lockd | str:
    """A daemon, or why there can be none."""
    directory.mkdir()
    off = {"enabled": False}
    locks = {"mode": mode, "mechanism": mechanism}
    config = {
        "programs": {"futex": off, "offcpu": off, "kernel_locks": locks},
        "filter": {"comms": ["lt*"]},
        "series": {"max": 100_000, "top_locks": 1000},
    }
    return lockd_or_reason(directory, config)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("ways"))
    yield bench
    bench.end()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, bench: Bench, record_property: pytest.RecordProperty) -> str:
    """A way that this kernel offers."""
    name: str = request.param
    mode, mechanism = WAYS[name]
    record_property("program", f"kernel_locks, mode {mode}")
    record_property("mechanism", mechanism)
    bench.daemon(name)
    return name


def labels_of(comm: str, lock_type: str) -> dict[str, str]:
    return {"unit": "kernel", "comm": comm, "lock_type": lock_type}


def counts(metrics: Metrics, comm: str, is_all: bool) -> dict[str, tuple[float, ...]]:
    """Waits, and in mode all acquisitions and holds, by lock type."""
    names = (WAITS, TAKEN, HOLDS) if is_all else (WAITS,)
    return {
        lock_type: tuple(metrics.sum(name, **labels_of(comm, lock_type)) for name in names)
        for lock_type in LOCK_TYPES
    }


def true_counts(truth: Truth, is_all: bool) -> dict[str, tuple[float, ...]]:
    return {
        lock_type: (told.waits, told.acquisitions, told.holds) if is_all else (told.waits,)
        for lock_type, told in truth.threads.items()
    }


def off(metrics: Metrics, comm: str, truth: Truth, is_all: bool) -> list[str]:
    """Words for each time that is not near the truth."""
    found = []
    for lock_type, told in truth.threads.items():
        labels = labels_of(comm, lock_type)
        times = {
            "waits": (metrics.sum(WAITED, **labels) * 1e6, told.wait_ns / 1e3, told.waits),
            "longest wait": (metrics.max(MAX_WAIT, window="5m", **labels), told.max_wait_ns / 1e3, 1),
        }
        if is_all:
            times["holds"] = (metrics.sum(HELD, **labels) * 1e6, told.hold_ns / 1e3, told.holds)
        for what, (seen_us, told_us, count) in times.items():
            if seen_us != pytest.approx(told_us, rel=SHARE, abs=EACH_US * count):
                found.append(f"{lock_type}, {what}: {seen_us:.0f} us, truth {told_us:.0f} us, count {count}")
    return found


@pytest.mark.parametrize("name", scripts())
def test_counts_are_exact_and_times_right(name: str, way: str, bench: Bench) -> None:
    is_all = WAYS[way][0] == "all"
    found = []
    for attempt in range(TRIES):
        comm, truth = bench.result(name, attempt)
        metrics = bench.metrics(way)
        assert counts(metrics, comm, is_all) == true_counts(truth, is_all)
        found.append(off(metrics, comm, truth, is_all))
        if not found[-1]:
            return
    pytest.fail(f"off in each of {TRIES} tries: {found}")


def lost(metrics: Metrics) -> dict[str, float]:
    """Events that were not counted, by what they would have been: waits or holds."""
    return {of: metrics.sum("lockd_dropped_events_total", map=of) for of in ("kernel_locks", "kernel_holds")}


@pytest.mark.parametrize("name", CROWDS)
def test_a_crowd_loses_nothing_that_is_not_counted(name: str, way: str, bench: Bench) -> None:
    """Many threads in one function at a time: a kretprobe follows only a few of them."""
    before = lost(bench.daemon(way).metrics())
    comm, truth = bench.result(name, list(WAYS).index(way))
    metrics = bench.metrics(way)
    losses = {of: count - before[of] for of, count in lost(metrics).items()}
    is_all, by_kretprobe = WAYS[way][0] == "all", WAYS[way][1] == "kprobe"
    missing = {"kernel_locks": 0.0, "kernel_holds": 0.0}
    for lock_type, told in truth.threads.items():
        labels = labels_of(comm, lock_type)
        missing["kernel_locks"] += told.waits - metrics.sum(WAITS, **labels)
        if is_all:
            assert metrics.sum(TAKEN, **labels) == told.acquisitions
            missing["kernel_holds"] += told.holds - metrics.sum(HOLDS, **labels)
    if not by_kretprobe:
        assert off(metrics, comm, truth, is_all) == []
    for of, count in missing.items():
        # All of the kernel may lose events, not only these threads.
        assert 0 <= count <= losses[of] if by_kretprobe else count == 0, (of, count, losses)


@pytest.mark.parametrize(
    ("name", "lock"),
    [
        ("contended mutex_lock", "lockd_test_mutex"),
        ("contended down_read", "lockd_test_rwsem"),
        ("contended down", "lockd_test_semaphore"),
    ],
)
def test_static_locks_have_names(name: str, lock: str, way: str, bench: Bench) -> None:
    comm, _ = bench.result(name, 0)
    rows = bench.daemon(way).api("locks", comm=comm)
    assert {row["lock"] for row in rows} == {lock}
