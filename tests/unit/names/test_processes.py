"""Names of processes: the kernel tells them, or else procfs. Processes come, rename themselves and go."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockd.names.labels import processes as module
from lockd.names.labels.processes import COMMS, KERNEL, NO_NAME, Processes, text
from lockd.names.labels.units import Units
from lockd.process.clock import NS, TICKS
from tests.support.small_procfs import Procfs

SERVICE = b"4:memory:/system.slice/a.service\n"


@pytest.fixture
def procfs(tmp_path: Path) -> Procfs:
    return Procfs(tmp_path)


@pytest.fixture
def processes(procfs: Procfs) -> Processes:
    return Processes(Units(procfs.root), procfs.root)


@pytest.mark.parametrize(
    ("comm", "name"),
    [
        (b"nginx\0\0\0", "nginx"),
        (b"nginx\0rest", "nginx"),
        (b"sixteen bytes ok", "sixteen bytes ok"),
        (b"", ""),
        (b"\0", ""),
        ("käse".encode(), "käse"),
        ("k\u00e4se".encode()[:2] + b"\0", "k\ufffd"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"a\nb\x1b[31m", "a?b?[31m"),
        ("\u202eabc".encode(), "?abc"),
    ],
)
def test_a_comm_is_printable_text(comm: bytes, name: str) -> None:
    assert text(comm) == name


def test_names_are_kept_once_and_not_for_ever() -> None:
    """Python 3.12.0 to 3.12.6 never frees an interned string, so that names would fill the memory."""
    assert text(bytes(bytearray(b"one name"))) is text(b"one name")
    for number in range(2 * COMMS):
        text(b"%d" % number)
    assert text.cache_info().currsize <= COMMS


def test_the_kernel_tells_names(procfs: Procfs, processes: Processes) -> None:
    procfs.add(7, b"server", cgroup=SERVICE)
    assert processes.learn(7, 1, b"server\0", kernel_thread=False) == ("a.service", "server")
    procfs.remove(7)
    assert processes.name(7) == ("a.service", "server")  # the process has ended, but its events still count
    assert processes.comm(7) == "server"


def test_a_process_that_is_gone_keeps_the_unit_it_had(procfs: Procfs, processes: Processes) -> None:
    procfs.add(7, b"sh", cgroup=SERVICE)
    assert processes.learn(7, 1, b"sh", kernel_thread=False) == ("a.service", "sh")
    procfs.remove(7)
    assert processes.learn(7, 1, b"server", kernel_thread=False) == ("a.service", "server")  # renamed by exec
    procfs.add(7, b"server")  # the cgroup of a process that is there counts
    assert processes.learn(7, 1, b"server", kernel_thread=False) == ("", "server")


def test_a_process_that_is_gone_gets_the_name_that_its_events_have(processes: Processes) -> None:
    assert processes.name(7) == NO_NAME
    assert processes.learn(7, 1, b"server", kernel_thread=False) == ("", "server")
    assert processes.name(7) == ("", "server")


def test_a_process_has_a_unit_if_its_first_thread_has_ended(procfs: Procfs, processes: Processes) -> None:
    procfs.add(7, b"server", cgroup=SERVICE)
    procfs.add_thread(7, 8, b"worker")
    procfs.end_leader(7, threads=2)
    assert processes.learn(7, 1, b"server", kernel_thread=False) == ("a.service", "server")


def test_a_process_that_its_parent_does_not_wait_for_keeps_the_unit_it_had(
    procfs: Procfs, processes: Processes
) -> None:
    procfs.add(7, b"sh", cgroup=SERVICE)
    assert processes.learn(7, 1, b"sh", kernel_thread=False) == ("a.service", "sh")
    procfs.end_leader(7)
    assert processes.learn(7, 1, b"server", kernel_thread=False) == ("a.service", "server")  # renamed by exec


def test_the_kernels_helper_program_is_no_kernel_thread_any_more(
    procfs: Procfs, processes: Processes
) -> None:
    assert processes.learn(7, 1, b"kworker/u8:3", kernel_thread=True) == (KERNEL, "kworker")
    assert processes.learn(7, 1, b"modprobe", kernel_thread=False) == ("", "modprobe")


@pytest.mark.parametrize(
    ("comm", "name"),
    [
        (b"kworker/0:1H-kblockd", "kworker"),
        (b"kworker/u8:3-events_unbound", "kworker"),
        (b"ksoftirqd/11", "ksoftirqd"),
        (b"migration/0", "migration"),
        (b"jbd2/sda1-8", "jbd2/sda1-8"),
        (b"kthreadd", "kthreadd"),
        (b"kswapd0", "kswapd0"),
    ],
)
def test_pools_of_kernel_threads_are_one_process(
    procfs: Procfs, processes: Processes, comm: bytes, name: str
) -> None:
    assert processes.learn(7, 1, comm, kernel_thread=True) == (KERNEL, name)
    procfs.add(8, comm, is_kernel=True)
    assert processes.name(8) == (KERNEL, name)


def test_a_kernel_thread_is_called_the_same_by_events_and_by_procfs(
    procfs: Procfs, processes: Processes
) -> None:
    procfs.add(7, b"irq/27-virtio0-output.0", is_kernel=True)
    assert processes.name(7) == (KERNEL, "irq/27-virtio0-")
    assert processes.learn(7, 1, b"irq/27-virtio0-\0", kernel_thread=True) == (KERNEL, "irq/27-virtio0-")


def test_a_kernel_thread_that_renamed_itself(procfs: Procfs, processes: Processes) -> None:
    procfs.add(7, b"made as this", is_kernel=True)
    assert processes.learn(7, 1, b"before\0", kernel_thread=True) == (KERNEL, "before")
    assert processes.learn(7, 1, b"called so\0", kernel_thread=True) == (KERNEL, "called so")
    assert processes.name(7, since=time.monotonic_ns()) == (KERNEL, "called so")


def test_a_user_process_is_no_kernel_thread_whatever_its_name(procfs: Procfs, processes: Processes) -> None:
    assert processes.learn(7, 1, b"kworker/0:1", kernel_thread=False) == ("", "kworker/0:1")
    procfs.add(8, b"kworker/0:1")  # like a program that kthreadd starts for the kernel
    assert processes.name(8) == ("", "kworker/0:1")
    procfs.add(9, b"a) S 2 (")
    assert processes.name(9) == ("", "a) S 2 (")
    procfs.add(2, b"kthreadd", is_kernel=True)
    assert processes.name(2) == (KERNEL, "kthreadd")


def test_a_silent_process_is_asked_of_procfs_once(procfs: Procfs, processes: Processes) -> None:
    procfs.add(7, b"server", cgroup=SERVICE)
    assert processes.name(7) == ("a.service", "server")
    procfs.remove(7)
    assert processes.name(7) == ("a.service", "server")


def test_a_process_that_is_gone_has_no_name(processes: Processes) -> None:
    assert processes.name(7) == ("", "")
    assert processes.comm(7) == ""
    assert processes.thread_comm(7, 8) == ""


def test_any_bytes_are_a_name(procfs: Procfs, processes: Processes) -> None:
    """A process chooses its own name. If its leader is a zombie, there is no command line."""
    procfs.add(7, b"\xff\xfe")
    assert processes.name(7) == ("", "\ufffd\ufffd")
    procfs.add(8, b"\xff", cgroup=b"4:memory:/\xff.service\n")
    assert processes.name(8) == ("\\xff.service", "\ufffd")
    procfs.add_thread(8, 9, b"\xfe")
    assert processes.thread_comm(8, 9) == "\ufffd"


def test_a_renamed_process_is_asked_again(procfs: Procfs, processes: Processes) -> None:
    procfs.add(7, b"sh")
    assert processes.name(7) == ("", "sh")
    procfs.add(7, b"server")  # exec
    assert processes.name(7) == ("", "sh")
    assert processes.name(7, since=time.monotonic_ns()) == ("", "server")
    procfs.remove(7)
    assert processes.name(7, since=time.monotonic_ns()) == ("", "server")


def test_an_event_of_long_ago_does_not_bring_an_old_name_back(procfs: Procfs, processes: Processes) -> None:
    procfs.add(7, b"server")
    processes.learn(7, 1, b"server", kernel_thread=False)
    # The event has the name that the process had then; by now the process has the other name.
    assert processes.learn(7, 1, b"sh", kernel_thread=False) == ("", "sh")
    assert processes.name(7) == ("", "server")
    procfs.add(7, b"worker")
    assert processes.learn(7, 1, b"worker", kernel_thread=False) == ("", "worker")
    assert processes.name(7) == ("", "worker")


def test_asking_again_is_limited(
    procfs: Procfs, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NS", 10**30)  # one second lasts for ever
    for tgid in range(1000, 1000 + 2 * module.ASKS_PER_SECOND):
        procfs.add(tgid, b"old")
        assert processes.comm(tgid) == "old"
        procfs.add(tgid, b"new")
    later = time.monotonic_ns()
    asked = [processes.name(tgid, since=later)[1] for tgid in range(1000, 1000 + 2 * module.ASKS_PER_SECOND)]
    assert asked.count("new") == module.ASKS_PER_SECOND


def test_ids_are_used_again(procfs: Procfs, processes: Processes) -> None:
    procfs.add(7, b"first")
    procfs.add(8, b"stays")
    assert (processes.comm(7), processes.comm(8)) == ("first", "stays")
    processes.keep({8})
    procfs.add(7, b"second")
    procfs.remove(8)
    assert (processes.comm(7), processes.comm(8)) == ("second", "stays")


def test_which_known_processes_live(procfs: Procfs, processes: Processes) -> None:
    for tgid in range(1, 7):
        procfs.add(tgid, b"a) Z 0")
        processes.learn(tgid, 1, b"shop", kernel_thread=False)
    processes.learn(0, 1, b"swapper/0", kernel_thread=True)
    procfs.remove(2)
    procfs.end_leader(3, threads=2)
    procfs.end_leader(4)  # its parent has not waited for it
    procfs.add(5, b"other", start=(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 10 * NS) * TICKS // NS)
    procfs.add(7, b"unknown")
    assert processes.find_living(seen={6, 8}) == {0, 1, 3}
