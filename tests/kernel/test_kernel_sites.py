"""Names and sites of the module's locks and of mmap_lock, as a daemon finds them that is alone on a host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Start
from lock_module import LockModule
from lock_scripts import scripts
from lockd_process import Lockd, Metrics

WAITERS = [name.removeprefix("contended ") for name in scripts() if name.startswith("contended ")]
LOCKS = {"m": "lockd_test_mutex", "d": "lockd_test_rwsem"}
SEMAPHORE = ("down", "down_interruptible", "down_killable", "down_timeout")
FAULTS = {"lock_mm_and_find_vma", "do_user_addr_fault", "exc_page_fault"}
MINCORES = {"__x64_sys_mincore", "__do_sys_mincore", "do_mincore"}


@pytest.fixture(scope="module")
def module() -> Iterator[LockModule]:
    module = LockModule()
    yield module
    module.unload()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, module: LockModule) -> Iterator[Lockd]:
    config = {
        "programs": {"futex": {"enabled": False}, "offcpu": {"enabled": False}},
        "filter": {"comms": ["ls*"]},
    }
    daemon = Lockd(tmp_path_factory.mktemp("alone"), config)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


def named(daemon: Lockd, comm: str) -> list[dict[str, Any]]:
    """Locks that threads called so waited for, when all have their names."""
    rows: list[dict[str, Any]] = []

    def are_named(_: Metrics) -> bool:
        rows[:] = [row for row in daemon.api("locks", comm=comm) if row["blocked_count"]]
        return bool(rows) and all(row["lock"] for row in rows)

    daemon.until(are_named, 30)
    return rows


@pytest.mark.parametrize("function", WAITERS)
def test_the_site_is_in_the_module(function: str, daemon: Lockd, module: LockModule) -> None:
    comm = f"ls{WAITERS.index(function)}"
    module.run(scripts()[f"contended {function}"], comm)
    rows = named(daemon, comm)
    static = "lockd_test_semaphore" if function in SEMAPHORE else LOCKS[function[0]]
    assert {row["lock"] for row in rows} == {static}
    # Where it does no more than return what the kernel's function returns, the compiler makes a jump of it.
    assert {row["site"] for row in rows} <= {f"call_{function}", "take", "do_step"}


def test_a_lock_without_a_name_has_that_of_its_site(daemon: Lockd, module: LockModule) -> None:
    module.run(scripts()["allocated"], "lsallocated")
    rows = named(daemon, "lsallocated")
    assert len(rows) >= 3
    assert all(row["lock"] == row["site"] for row in rows), rows
    assert {row["site"] for row in rows} <= {
        "call_mutex_lock", "call_down_read", "call_down", "take", "do_step"
    }  # fmt: skip


@pytest.mark.parametrize(("fault", "sites"), [(0, MINCORES), (1, FAULTS)])
def test_the_lock_of_an_address_space(fault: int, sites: set[str], daemon: Lockd, workload: Start) -> None:
    one = workload("mmap_lock", 20, 64, fault, comm=f"lsmm{fault}")
    one.run()
    rows = [row for row in named(daemon, one.comm) if row["kind"] == "rwsem_read"]
    one.finish()
    assert {row["lock"] for row in rows} == {"mmap_lock"}
    assert {row["site"] for row in rows} <= sites
