"""The service from one start to the next, with systemd's own descriptor store: nothing is lost, and nothing
stays behind. On the machine of test_service.py, where lockd runs by then.

The waits of a load are counted by the load itself.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_service import URL, is_active, journal, processes, programs, show, until

from tests.machine.qemu import Machine

pytestmark = pytest.mark.timeout(3600)

LIBRARY = "/usr/lib/lockd/lockd"
ORDERS, TRUTH = "/run/orders", "/run/truth"
STORM = "/usr/lib/lockd-tests/storm 2 0 1 50 1000"
RESTARTS = 2
KILLS = 3
ANSWER_SECONDS = 120
Counters = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(guest: Machine) -> tuple[Counters, Counters]:
    """Counters, with what histograms consist of; and all else."""
    answer = guest.get(f"{URL}/metrics")
    assert answer.code == 0, answer.out
    counters: Counters = {}
    others: Counters = {}
    for family in text_string_to_metric_families(answer.out):
        of = counters if family.type in ("counter", "histogram") else others
        of |= {(one.name, tuple(sorted(one.labels.items()))): one.value for one in family.samples}
    return counters, others


def total(of: Counters, name: str, **labels: str) -> float:
    wanted = labels.items()
    return sum(value for (metric, key), value in of.items() if metric == name and wanted <= dict(key).items())


def started(guest: Machine) -> float:
    return total(scrape(guest)[1], "lockd_start_time_seconds")


@dataclass
class Watched:
    """Looks whether counters fall."""

    guest: Machine
    last: Counters = field(default_factory=dict)

    def look(self) -> None:
        before, self.last = self.last, scrape(self.guest)[0]
        fallen = [key for key, was in before.items() if self.last.get(key, -1) < was]
        assert not [(key, before[key], self.last.get(key)) for key in fallen]


@contextlib.contextmanager
def load(guest: Machine, comm: str) -> Iterator[Callable[[], dict[str, int]]]:
    """Threads that wait all the time; what is yielded ends them and says how often they have waited."""
    guest.shell(f"rm -f {ORDERS} {TRUTH}; : >{ORDERS}")
    command = f"tail -n +1 -f {ORDERS} | LOCKD_COMM={comm} {STORM}"
    unit = f"load-{comm}"
    guest.shell(f"systemd-run --quiet --unit={unit} sh -c '{command} >{TRUTH}'")
    try:
        until(guest, lambda: "ready" in guest.shell(f"cat {TRUTH}"), "ready", 60)
        guest.shell(f"printf g >>{ORDERS}")

        def end() -> dict[str, int]:
            guest.shell(f"printf e >>{ORDERS}")
            until(guest, lambda: "futex" in guest.shell(f"cat {TRUTH}"), "truth", 60)
            truth = json.loads(guest.shell(f"cat {TRUTH}").splitlines()[-1])
            until(guest, lambda: guest.get(f"{URL}/-/settled").code == 0, "all counted", 60)
            return {name: int(value) for name, value in truth["futex"]["lock"].items()}

        yield end
    finally:
        guest.run("systemctl", "stop", unit)


def another_runs(guest: Machine, which: str, was: int) -> None:
    until(guest, lambda: processes(guest).get(which, 0) not in (0, was), f"another {which}", ANSWER_SECONDS)


def serves_again(guest: Machine, was: int) -> None:
    """Another sampler than that of this process id is ready."""
    until(
        guest,
        lambda: is_active(guest) and show(guest, "MainPID") not in ("0", str(was)),
        "active again",
        ANSWER_SECONDS,
    )
    until(guest, lambda: guest.get(f"{URL}/-/ready").code == 0, "answers again", ANSWER_SECONDS)


def kernel_objects(guest: Machine) -> dict[str, list[Any]]:
    """The names or ids of BPF programs that trace, of maps of programs' and of links."""
    maps = json.loads(guest.shell("bpftool map show -j"))
    links = json.loads(guest.shell("bpftool link show -j"))
    return {
        "programs": programs(guest),
        "maps": sorted(one.get("name", "") for one in maps),
        "links": sorted(one["id"] for one in links),
    }


def test_a_restart_under_load_loses_nothing(guest: Machine) -> None:
    attached, began = programs(guest), started(guest)
    taken_over = total(scrape(guest)[0], "lockd_taken_over_total", after="end")
    with load(guest, "restarted") as end:
        watched = Watched(guest)
        for _ in range(RESTARTS):
            watched.look()
            guest.shell("systemctl restart lockd", seconds=ANSWER_SECONDS)
            assert programs(guest) == attached, "one of each, as before"
            watched.look()
        truth = end()
    counters, _ = scrape(guest)
    assert truth["waits"] > 100
    assert total(counters, "lockd_futex_waits_total", comm="restarted", kind="lock") == truth["waits"]
    blocked = total(counters, "lockd_futex_blocked_seconds_count", comm="restarted", kind="lock")
    assert blocked == truth["blocked"]
    assert total(counters, "lockd_dropped_events_total") == 0
    assert total(counters, "lockd_taken_over_total", after="end") == taken_over + RESTARTS
    assert started(guest) == began


@pytest.mark.parametrize(
    "kills", [KILLS, pytest.param(20, marks=pytest.mark.thorough("20 kills of each take half an hour"))]
)
@pytest.mark.parametrize("which", ["sampler", "namer", "exporter"])
def test_kills_under_load_lose_a_period_at_most(guest: Machine, which: str, kills: int) -> None:
    comm = f"{which}-{kills}"
    before = scrape(guest)[0]
    began = started(guest)
    with load(guest, comm) as end:
        watched, since = Watched(guest), guest.shell("cat /proc/uptime")
        for number in range(kills):
            watched.look()
            until(guest, lambda: which in processes(guest), f"a {which}", ANSWER_SECONDS)
            was = processes(guest)
            time.sleep(0.1 * (number % 5))
            guest.shell(f"kill -KILL {was[which]}")
            if which == "sampler":
                serves_again(guest, was["sampler"])
            else:
                another_runs(guest, which, was[which])
                until(guest, lambda: guest.get(f"{URL}/-/ready").code == 0, "answers", ANSWER_SECONDS)
                assert processes(guest)["sampler"] == was["sampler"]
            watched.look()
        truth, until_then = end(), guest.shell("cat /proc/uptime")
    counters, _ = scrape(guest)

    def more(name: str, **labels: str) -> float:
        return total(counters, name, **labels) - total(before, name, **labels)

    interrupted = more("lockd_interrupted_drains_total")
    assert interrupted <= (kills if which == "sampler" else 0)
    assert more("lockd_taken_over_total", after="crash") == (kills if which == "sampler" else 0)
    seconds = float(until_then.split()[0]) - float(since.split()[0])
    of_a_second = truth["waits"] / seconds  # of a period, or what a slow machine makes of it
    for name, told in (
        ("lockd_futex_waits_total", truth["waits"]),
        ("lockd_futex_blocked_seconds_count", truth["blocked"]),
    ):
        counted = total(counters, name, comm=comm, kind="lock")
        print(f"{name}: {counted:.0f} of {told}, interrupted {interrupted:.0f}")
        assert told - interrupted * of_a_second <= counted <= told
    assert more("lockd_dropped_events_total") == 0
    assert started(guest) == began


def test_an_upgrade_with_the_same_programs_goes_on(guest: Machine) -> None:
    before, began = scrape(guest)[0], started(guest)
    for part in ("sample/loop.py", "export/page.py"):
        guest.shell(f"echo '# another version' >>{LIBRARY}/{part}")
    guest.shell("systemctl restart lockd", seconds=ANSWER_SECONDS)
    watched = Watched(guest, before)
    watched.look()
    assert started(guest) == began


def test_an_upgrade_with_other_programs_begins_anew(guest: Machine) -> None:
    before, attached, began = scrape(guest)[0], programs(guest), started(guest)
    guest.shell(f"echo '# another version' >>{LIBRARY}/load/loader.py")
    guest.shell("systemctl restart lockd", seconds=ANSWER_SECONDS)
    assert programs(guest) == attached, "one of each: those from before are gone"
    said = [entry["MESSAGE"] for entry in journal(guest, "-b")]
    assert any("not used: this start loads other programs" in line for line in said)
    counters, _ = scrape(guest)
    assert total(before, "lockd_futex_waits_total", comm="restarted") > 0
    assert total(counters, "lockd_futex_waits_total", comm="restarted") == 0
    assert total(counters, "lockd_taken_over_total") == 0
    assert started(guest) > began


def test_a_stop_leaves_nothing_and_a_start_begins_at_zero(guest: Machine) -> None:
    running = kernel_objects(guest)
    assert running["programs"]
    assert running["links"]
    assert int(show(guest, "NFileDescriptorStore")) > len(running["programs"])
    began = started(guest)
    guest.shell("systemctl stop lockd")
    assert show(guest, "NFileDescriptorStore") == "0"
    until(guest, lambda: not programs(guest), "all let go", 60)
    left = kernel_objects(guest)
    assert left["links"] == []
    assert not {"control", "threads", "futex_0", "futex_1"} & set(left["maps"]), left
    guest.shell("systemctl start lockd", seconds=ANSWER_SECONDS)
    assert total(scrape(guest)[0], "lockd_taken_over_total") == 0
    assert started(guest) > began
    guest.shell("systemctl stop lockd")
    assert kernel_objects(guest) == left, "as after the first stop"
    assert programs(guest) == []
