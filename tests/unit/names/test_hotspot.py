"""HotSpot's structures, in memory that a process has made up."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fuzz import memory


@pytest.mark.parametrize(("number", "is_told"), [(3, True), (255, True), (256, False), (2**31, False)])
def test_a_number_that_fits_into_no_map_of_the_programs_is_not_told(
    number: int, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any process can have a libjvm.so, and the sampler puts numbers from its memory into a BPF map."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory.made_up_process.cache_clear()
    (machine,) = memory.java_machines()
    shift = struct.pack("<QH", memory.BIAS + 0x500, 0x20)  # the part of memory with the number, at 8
    at = machine.index(shift) + len(shift) + 8
    changed = machine[:at] + struct.pack("<I", number) + machine[at + 4 :]
    places = memory.machine_of(changed).places(memory.THREAD_POINTER)
    assert (places is not None) == is_told
    assert not places or places.oop_shift == number


def test_a_library_that_was_closed_is_asked_again_once_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of object files may close libjvm.so between two looks at one stack."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory.made_up_process.cache_clear()
    (machine,) = memory.java_machines()
    hotspot = memory.machine_of(machine)
    library: Any = hotspot.library
    closed: Any = SimpleNamespace(variable_address=lambda name: None, thread_local_block=None)
    hotspot.library = closed
    assert hotspot.places(memory.THREAD_POINTER) is None
    hotspot.library = library
    assert hotspot.places(memory.THREAD_POINTER)
