"""A made-up host for tests of how holds of kernel locks are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel_hold_host import Host
from tests.support.small_procfs import Procfs


@pytest.fixture
def procfs(tmp_path: Path) -> Procfs:
    return Procfs(tmp_path)


@pytest.fixture
def host(procfs: Procfs) -> Host:
    return Host(procfs.root)
