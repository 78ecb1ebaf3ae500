"""Who holds a kernel lock, where that cannot be told."""

from __future__ import annotations

import os

import pytest

from lockd.kernel.lock_owners import FUNCTION, KernelOwners

LOCK, WAITER = 0xFFFF888000000000, 1


def test_without_a_program_no_lock_has_an_owner() -> None:
    owners = KernelOwners(-1)
    assert not owners.is_available
    assert owners.owner(LOCK, WAITER) == 0


def test_a_kernel_that_refuses_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    with open(os.devnull) as no_program:
        owners = KernelOwners(no_program.fileno())
        assert [owners.owner(LOCK, WAITER) for _ in range(3)] == [0, 0, 0]
    assert not owners.is_available
    (record,) = caplog.records
    assert FUNCTION in record.getMessage()
