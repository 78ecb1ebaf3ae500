"""Names and sites of the test module's locks and of mmap_lock, found while no daemon has kprobes attached."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.checks import in_one_of_some_tries
from tests.support.lock_module import LockModule
from tests.support.lock_scripts import scripts
from tests.support.lockd_process import Lockd
from tests.support.workload import Start

CONTENDED_BY, ALLOCATED = "contended ", "allocated"
CONTENDED = [name for name in scripts() if name.startswith(CONTENDED_BY)]
LOCKS = {"m": "lockd_test_mutex", "d": "lockd_test_rwsem"}
SEMAPHORE = ("down", "down_interruptible", "down_killable", "down_timeout")
FAULTS = {"lock_mm_and_find_vma", "do_user_addr_fault", "exc_page_fault"}
MINCORES = {"__x64_sys_mincore", "__do_sys_mincore", "do_mincore"}


@pytest.fixture(scope="module")
def rows(lockd: Lockd, module: LockModule) -> dict[str, list[dict[str, Any]]]:
    """The locks that the threads of each script waited for, once all of these locks have their names."""
    comms = {name: f"ls{at}" for at, name in enumerate((*CONTENDED, ALLOCATED))}
    for name, comm in comms.items():
        module.run(scripts()[name], comm)
    lockd.metrics()
    return {name: lockd.waited_for(comm=comm) for name, comm in comms.items()}


@pytest.mark.parametrize("name", CONTENDED)
def test_the_site_is_in_the_module(name: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    function = name.removeprefix(CONTENDED_BY)
    static = "lockd_test_semaphore" if function in SEMAPHORE else LOCKS[function[0]]
    assert {row["lock"] for row in rows[name]} == {static}
    # Where call_FUNCTION() ends with a tail call of the kernel's function, it has no frame. The site is then
    # one of its callers.
    assert {row["site"] for row in rows[name]} <= {f"call_{function}", "take", "do_step"}


def test_a_lock_without_a_name_has_that_of_its_site(rows: dict[str, list[dict[str, Any]]]) -> None:
    found = rows[ALLOCATED]
    assert len(found) >= 3
    assert all(row["lock"] == row["site"] for row in found), found
    assert {row["site"] for row in found} <= {
        "call_mutex_lock", "call_down_read", "call_down", "take", "do_step"
    }  # fmt: skip


@pytest.mark.parametrize(("fault", "sites"), [(0, MINCORES), (1, FAULTS)])
def test_the_lock_of_an_address_space(fault: int, sites: set[str], lockd: Lockd, workload: Start) -> None:
    one = workload("mmap_lock", 20, 64, fault, comm=f"lsmm{fault}")
    one.run()
    found = lockd.waited_for(comm=one.comm, kind="rwsem_read")
    one.finish()
    assert {row["lock"] for row in found} == {"mmap_lock"}
    assert {row["site"] for row in found} <= sites


def test_long_waits_count_where_they_happen_beside_short_ones_of_the_same_thread(
    lockd: Lockd, workload: Start
) -> None:
    """All of these waits are for one lock, of one thread and in the same second."""

    def attempt() -> list[str]:
        one = workload("mmap_lock", 40, 512, 2)
        truth = one.run()
        lockd.settle()
        rows = lockd.waited_for(comm=one.comm, kind="rwsem_read")
        one.finish()
        print(truth, [(row["site"], row["blocked_us"]) for row in rows])
        assert {row["site"] for row in rows} <= MINCORES | FAULTS
        found = sum(row["blocked_us"] for row in rows if row["site"] in FAULTS)
        if not truth["mincore_us"]:
            return ["the short waits were too short to block"]
        share = found / sum(row["blocked_us"] for row in rows)
        expected = truth["fault_us"] / (truth["fault_us"] + truth["mincore_us"])
        return [f"{share:.3f}, not {expected:.3f}"] if abs(share - expected) > 0.1 else []

    in_one_of_some_tries(attempt)
