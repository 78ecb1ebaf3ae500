"""One machine for all tests of this directory, whose files come in the order of its life."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guest import booted

from tests.machine.qemu import Machine
from tests.needs import need
from tests.vm.emulator import need_emulator


@pytest.fixture(scope="session")
def guest() -> Iterator[Machine]:
    need_emulator()
    need("systemctl")
    with booted() as machine:
        yield machine
