"""The service from one start to the next, with systemd's own descriptor store: nothing is lost, no counter
falls, and nothing stays behind.

The waits of the load are counted by the load itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.test_adoption import Counters, counters, fallen, interrupted_waits, loaded_by
from tests.kernel.test_nothing_left import check_gone, in_kernel, new_since, processes_of
from tests.needs import need
from tests.support.service_manager import Service
from tests.support.workload import Start

RESTARTS = 3
KILLS = {"sampler": 20, "namer": 20, "exporter": 7}
"""How often each process is killed. An exporter that ends again and again is started ever later: the seventh
time after a minute."""
CHILDREN = {"namer": "lockd.names", "exporter": "lockd.export"}
BACKOFF_SECONDS = 120
"""How long a process may take to come back: an exporter that ends again and again is started ever later."""
STORM = ("storm", 2, 0, 1, 50, 500)


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Service]:
    need("systemctl")
    one = Service(tmp_path_factory.mktemp("service"))
    yield one
    one.close()


@pytest.fixture
def service(manager: Service) -> Iterator[Service]:
    """The service while it runs. Its counters begin at zero."""
    manager.systemctl("start")
    yield manager
    manager.systemctl("stop")


def ours(service: Service) -> list[int]:
    """Return the ids of systemd, which keeps descriptors of the service, and of the service's processes if it
    runs."""
    sampler = service.pid
    return [service.systemd_pid, *(processes_of(sampler) if sampler else ())]


def test_a_restart_loses_nothing(service: Service, workload: Start) -> None:
    before = in_kernel()
    load = workload(*STORM)
    load.go()
    first = service.metrics()
    for _ in range(RESTARTS):
        told = counters(service)
        service.systemctl("restart")
        assert fallen(told, counters(service)) == {}
    load.go()
    truth = load.truth()["futex"]["lock"]
    metrics = service.metrics()
    counted = metrics.sum("lockd_futex_waits_total", comm=load.comm, kind="lock")
    blocked = metrics.sum("lockd_futex_blocked_seconds_count", comm=load.comm, kind="lock")
    assert truth["waits"] > 1000
    assert truth["waits"] - metrics.not_told <= counted <= truth["waits"]
    assert truth["blocked"] - metrics.not_told <= blocked <= truth["blocked"]
    assert metrics.sum("lockd_taken_over_total", after="end") == RESTARTS
    assert metrics.sum("lockd_start_time_seconds") == first.sum("lockd_start_time_seconds")
    new = new_since(before, ours(service))
    assert not {one for one in new if one.startswith("link")}, "attached once, as before"


def pid_of(service: Service, which: str) -> int:
    """Return the id of the sampler, the namer or the exporter, or 0 if there is none at the moment."""
    sampler = service.pid
    if which == "sampler" or not sampler:
        return sampler
    for pid in processes_of(sampler)[1:]:
        if CHILDREN[which] in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    return 0


def until_another(service: Service, which: str, was: int) -> None:
    deadline = time.monotonic() + BACKOFF_SECONDS
    while pid_of(service, which) in (0, was):
        assert time.monotonic() < deadline, f"no other {which}:\n{service.said()}"
        time.sleep(0.05)


@pytest.mark.thorough("20 kills take minutes; test_adoption.py has some without systemd")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["sampler", "namer", "exporter"])
def test_a_kill_loses_a_period_at_most(service: Service, workload: Start, which: str) -> None:
    load = workload(*STORM)
    began = time.monotonic()
    load.go()
    first = service.metrics()
    for number in range(KILLS[which]):
        told = counters(service)
        sampler, killed = service.pid, pid_of(service, which)
        time.sleep(0.07 * (number % 7))
        os.kill(killed, signal.SIGKILL)
        if which == "sampler":
            service.until_it_serves(after=sampler)
        until_another(service, which, killed)
        assert (service.pid == sampler) == (which != "sampler")
        assert fallen(told, counters_again(service)) == {}
        until_another(service, "namer", 0)
    load.go()
    truth, seconds = load.truth()["futex"]["lock"], time.monotonic() - began
    metrics = service.metrics()
    interrupted = metrics.sum("lockd_interrupted_drains_total")
    kills = KILLS[which] if which == "sampler" else 0
    assert interrupted <= kills
    assert metrics.sum("lockd_taken_over_total", after="crash") == kills
    assert metrics.sum("lockd_start_time_seconds") == first.sum("lockd_start_time_seconds")
    counted = metrics.sum("lockd_futex_waits_total", comm=load.comm, kind="lock")
    elsewhere = metrics.not_told
    print(f"{which}: {counted:.0f} of {truth['waits']}; drains {interrupted:.0f}, elsewhere {elsewhere:.0f}")
    lost = interrupted_waits(metrics, truth["waits"], seconds) + elsewhere
    assert truth["waits"] - lost <= counted <= truth["waits"]


def counters_again(service: Service) -> Counters:
    """Return the counters once the exporter answers."""
    deadline = time.monotonic() + BACKOFF_SECONDS
    while True:
        try:
            return counters(service)
        except (AssertionError, OSError):
            assert time.monotonic() < deadline, service.said()
            time.sleep(0.1)


def test_an_upgrade_with_the_same_programs_goes_on(service: Service, workload: Start) -> None:
    one = workload("mutex_handover", 50, 1000)
    one.run()
    told, began = counters(service), service.metrics().sum("lockd_start_time_seconds")
    for part in ("sample/loop.py", "export/handlers.py", "names/client.py"):
        with open(service.library / "lockd" / part, "a") as file:
            file.write("# another version\n")
    service.systemctl("restart")
    assert fallen(told, counters(service)) == {}
    metrics = service.metrics()
    assert metrics.sum("lockd_futex_waits_total", comm=one.comm, kind="lock") == 50
    assert metrics.sum("lockd_start_time_seconds") == began


def test_an_upgrade_with_other_programs_begins_anew(service: Service, workload: Start) -> None:
    loaded = loaded_by(service.pid)
    assert len([one for one in loaded if one.startswith("prog")]) > 5
    one = workload("mutex_handover", 50, 1000)
    one.run()
    began = service.metrics().sum("lockd_start_time_seconds")
    with open(service.library / "lockd/bpf/daemon/futex.bpf.c", "a") as file:
        file.write("/* another version */\n")
    service.systemctl("restart")
    assert "not used: this start loads other programs" in service.said()
    other = workload("mutex_handover", 30, 1000)
    other.run()
    metrics = service.metrics()
    assert metrics.sum("lockd_futex_waits_total", comm=one.comm, kind="lock") == 0
    assert metrics.sum("lockd_futex_waits_total", comm=other.comm, kind="lock") == 30
    assert metrics.sum("lockd_taken_over_total") == 0
    assert metrics.sum("lockd_start_time_seconds") > began
    check_gone(loaded, set(), ours(service))


def test_a_stop_leaves_nothing_and_a_start_begins_at_zero(manager: Service) -> None:
    before = in_kernel()
    began = 0.0
    for _ in range(2):
        manager.systemctl("start")
        loaded = new_since(before, ours(manager))
        assert len([one for one in loaded if one.startswith("prog")]) > 5
        assert manager.kept > 30
        metrics = manager.metrics()
        assert metrics.sum("lockd_taken_over_total") == 0
        assert metrics.sum("lockd_start_time_seconds") > began
        began = metrics.sum("lockd_start_time_seconds")
        manager.systemctl("stop")
        assert manager.kept == 0
        assert manager.show("Result") == "success"
        check_gone(loaded, before, [os.getpid()])


def test_a_failure_for_good_leaves_nothing(manager: Service) -> None:
    """The configuration is wrong by the time of a restart."""
    before = in_kernel()
    manager.systemctl("start")
    loaded = new_since(before, ours(manager))
    config = manager.library.parent / "lockd.yaml"
    text = config.read_text()
    config.write_text("perid: 10ms\n")
    try:
        with pytest.raises(AssertionError, match="perid"):
            manager.systemctl("restart")
        assert manager.show("ExecMainStatus") == "2"
        assert manager.kept == 0
        check_gone(loaded, before, [os.getpid()])
    finally:
        config.write_text(text)
        manager.systemctl("reset-failed")
