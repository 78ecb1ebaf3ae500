"""What remains once lockd has started: three processes with few threads, none of which can load a program."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.cost import children_of
from bench.startup import maps_bytes, maps_target
from lockd.process import privileges
from tests.kernel.test_signals import until
from tests.support.lockd_process import CHECKOUT, Lockd

pytestmark = pytest.mark.untimed

LOADING = {"CAP_BPF", "CAP_PERFMON", "CAP_SYS_ADMIN", "CAP_SYS_RESOURCE"}
READING = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
CONFINED = ("export", "names")
"""The processes that run as another user than root, with a filter of system calls. The filter comes last."""

MAP = "anon_inode:bpf-map"
"""What the descriptor of a map refers to."""
RING_DESCRIPTORS = 3
"""The number of descriptors of the namer's only map, a ring: its own and those of two mappings, for Python
keeps a descriptor for each mapping.
"""


@pytest.fixture(scope="module")
def daemon(host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lockd]:
    """A daemon that has answered a scrape, so that every one of its processes is at work."""
    started = Lockd(tmp_path_factory.mktemp("started"))
    started.metrics()
    yield started
    assert started.stop() == 0, "".join(started.log)


@pytest.fixture(scope="module")
def processes(daemon: Lockd) -> dict[str, int]:
    return processes_of(daemon)


def processes_of(daemon: Lockd) -> dict[str, int]:
    """Return the ids of lockd's processes by their names, once the exporter and the namer are confined.

    The namer is started when the exporter serves already, and takes a while to confine itself.
    """
    until(lambda: are_confined(named_processes(daemon)), "the exporter and the namer are confined")
    return named_processes(daemon)


def named_processes(daemon: Lockd) -> dict[str, int]:
    """Return the process ids of lockd's processes by their names.

    A child without a module of its own, such as one that is not yet more than a fork, has its command line as
    its name.
    """
    found = {"sampler": daemon.process.pid}
    for pid, command in children_of(daemon.process.pid).items():
        name = re.search(r"isolation\.py lockd\.(\w+)", command)
        found[name[1] if name else command] = pid
    return found


def are_confined(processes: dict[str, int]) -> bool:
    """Whether the exporter and the namer are there and have their filters of system calls."""
    return all(name in processes and status(processes[name])["Seccomp"] == "2" for name in CONFINED)


def capabilities(pid: int) -> Iterator[set[str]]:
    """Yield for each thread of a process all capabilities that it has or may come to have."""
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        sets = re.findall(r"^Cap(?:Prm|Eff|Bnd|Amb|Inh):\s*(\w+)$", status.read_text(), re.MULTILINE)
        bits = 0
        for one in sets:
            bits |= int(one, 16)
        yield {name for name, number in privileges.NUMBERS.items() if bits >> number & 1}


def descriptors(pid: int) -> list[str]:
    """Return what the open descriptors of a process refer to, but for the standard three."""
    directory = Path(f"/proc/{pid}/fd")
    found = []
    for fd in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed just now
            found += [os.readlink(fd)] if int(fd.name) > 2 else []
    return found


def maps_open(pid: int) -> int:
    """Return how many descriptors of maps a process has."""
    return descriptors(pid).count(MAP)


def test_the_loader_is_gone(processes: dict[str, int]) -> None:
    assert processes.keys() == {"sampler", "export", "names"}


def test_no_thread_can_load_a_program(daemon: Lockd, processes: dict[str, int]) -> None:
    kept = re.findall(r"lets only (\w+) read maps: the sampler keeps it", "".join(daemon.log))  # before 5.19
    for name, pid in processes.items():
        for has in capabilities(pid):
            assert has & LOADING <= (set(kept) if name == "sampler" else set()), name


def test_the_exporter_has_no_capability_and_nothing_open_of_the_sampler(processes: dict[str, int]) -> None:
    pid = processes["export"]
    assert list(capabilities(pid)) == [set()] * len(os.listdir(f"/proc/{pid}/task"))
    kinds = {re.sub(r"\d+", "", one) for one in descriptors(pid)}
    assert kinds <= {"socket:[]", "anon_inode:[eventpoll]", "/memfd:lockd-snapshot (deleted)"}


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


def test_no_process_gets_more_by_what_it_executes(processes: dict[str, int]) -> None:
    assert {status(pid)["NoNewPrivs"] for pid in processes.values()} == {"1"}


def test_what_reads_what_others_wrote_is_no_roots_and_may_call_little(processes: dict[str, int]) -> None:
    """The exporter and the namer run as another user than root, with a filter for system calls.

    What they may do is tested in tests/unit/process/test_confinement.py.
    """
    for name in CONFINED:
        about = status(processes[name])
        assert about["Seccomp"] == "2", name
        assert "0" not in about["Uid"].split() + about["Gid"].split(), name


def test_the_sampler_changes_its_user_in_no_thread(processes: dict[str, int]) -> None:
    for about in Path(f"/proc/{processes['sampler']}/task").glob("*/status"):
        (effective,) = re.findall(r"^CapEff:\s*(\w+)$", about.read_text(), re.MULTILINE)
        for name in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            assert not int(effective, 16) >> privileges.NUMBERS[name] & 1


def test_the_namer_reads_and_has_nothing_else(processes: dict[str, int]) -> None:
    assert all(has <= READING for has in capabilities(processes["names"]))
    until(lambda: maps_open(processes["names"]) in (0, RING_DESCRIPTORS), "the namer has mapped its ring")
    kinds = {re.sub(r"\d+", "", one) for one in descriptors(processes["names"])}
    assert {one for one in kinds - {MAP} if not one.startswith("/")} <= {"socket:[]", "pipe:[]"}


def test_the_namer_reads_whoever_has_started_lockd(host: None, tmp_path: Path) -> None:
    """The namer can read other processes even if another user than root starts lockd.

    At execve(), a process of such a user keeps only the capabilities in its ambient set.
    """
    names = privileges.capabilities() & (LOADING | READING)
    caps = ",".join(f"+{name.removeprefix('CAP_').lower()}" for name in sorted(names))
    user = ("--reuid=nobody", "--regid=nogroup", "--clear-groups")
    started = Lockd(
        tmp_path, program=["setpriv", *user, f"--inh-caps={caps}", f"--ambient-caps={caps}", "--", *CHECKOUT]
    )
    try:
        started.metrics()
        effective = {name: int(status(pid)["CapEff"], 16) for name, pid in processes_of(started).items()}
    finally:
        code = started.stop()
    assert code == 0, "".join(started.log)
    assert effective["export"] == 0
    assert effective["names"] == sum(1 << privileges.NUMBERS[name] for name in READING)


def test_no_library_has_started_threads(processes: dict[str, int]) -> None:
    """No library starts threads. OpenBLAS would start one for each processor, with memory of its own."""
    counts = {name: len(os.listdir(f"/proc/{pid}/task")) for name, pid in processes.items()}
    assert counts["sampler"] <= 2, "itself, and the one that waits for membarrier()"
    assert counts["names"] == 1
    assert counts["export"] <= 2, "itself, and the one that renders"


def test_the_maps_are_small(processes: dict[str, int]) -> None:
    """With the default configuration, the maps exceed their target by 25% at most.

    Kernels differ a little in what they count as the memory of an entry.
    """
    assert 0 < sum(maps_bytes(processes["sampler"]).values()) <= 1.25 * maps_target()
