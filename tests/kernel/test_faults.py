"""All faults of bench/faults.py, one after another, in one run of lockd under a stand-in for systemd."""

from __future__ import annotations

import pytest

from bench import faults


@pytest.mark.thorough(
    "ten minutes, with all processors taken for some seconds; other tests here have single faults"
)
@pytest.mark.timeout(3600)
def test_each_fault_once(host: None) -> None:
    found = faults.measure(faults.faults(), minutes=0, every=5, idle=False)
    assert faults.failures(found) == [], faults.report(found, [])
