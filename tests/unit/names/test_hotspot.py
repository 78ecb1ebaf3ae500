"""HotSpot's structures, in memory that a process has made up."""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockd.names.locks.locking_code import Frame
from lockd.names.locks.user_locks import UserLock, UserNames
from lockd.names.runtimes import hotspot
from lockd.names.runtimes.hotspot import CLASS_BYTES, FLAG, MOST_STRUCTURES, STRUCTURE
from lockd.names.unwind.capture import Capture
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
    java = memory.machine_of(machine)
    library: Any = java.library
    closed: Any = SimpleNamespace(variable_address=lambda name: None, thread_local_block=None)
    java.library = closed
    assert java.places(memory.THREAD_POINTER) is None
    java.library = library
    assert java.places(memory.THREAD_POINTER)


def test_of_a_long_description_only_what_is_asked_for_is_kept() -> None:
    described = [*memory.FIELDS, *(("Type", f"_field{n}", "int", -8) for n in range(MOST_STRUCTURES))]

    class Described:
        """Memory with a description of all these fields at address 0, each with three texts."""

        def read(self, address: int, size: int) -> bytes:
            first = 3 * (address // size) + 1
            return STRUCTURE.pack(first, first + 1, first + 2, 0, 8, 0)

        def text(self, address: int) -> str:
            number, part = divmod(address - 1, 3)
            return str(described[number][part])

    machine: Any = Described()
    found = hotspot._structures(machine, 0)
    assert found == {f"{of}::{name}": (kind, 8) for of, name, kind, _ in memory.FIELDS}
    assert found.keys() <= hotspot.FIELDS
    assert len(hotspot.FIELDS) < 30


def test_remembered_classes_are_in_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory.made_up_process.cache_clear()
    (machine,) = memory.java_machines()
    java = memory.machine_of(machine)
    assert java.places(memory.THREAD_POINTER)
    assert java.memory == 0
    for _ in range(2):
        name = java.wait(FLAG | 1 << 32, "lock").name
        assert name == "com.Shop$Sku"
        assert java.memory == CLASS_BYTES + sys.getsizeof(name)


NAMELESS_JVM = (("libc.so.6", "pthread_cond_wait"), ("libjvm.so", ""), ("libjvm.so", ""))
"""The functions of any thread that waits in Java: the libjvm.so of distributions has no symbols."""
PARKED_BY, SYMBOL = FLAG | 1 << 32, 0x7F0000060004
"""The number of a wait for a class, and the address of the length of this class's name."""


def first_answer(machine: bytes, monkeypatch: pytest.MonkeyPatch) -> UserLock:
    """What a new namer says of a wait of the Java machine with this memory."""
    java = memory.machine_of(machine)
    frames = [Frame(of, function, f"{of}:{function or '+0x10'}") for of, function in NAMELESS_JVM]
    monkeypatch.setattr(UserNames, "_frames", lambda *_: frames)
    monkeypatch.setattr(UserNames, "_hotspot", lambda *_: java)
    capture = Capture((0,) * 17, b"", (), memory.THREAD_POINTER)
    return UserNames(memory.made_up_process().parent).name_lock(7, 7, PARKED_BY, "cond", capture)


def test_the_first_answer_of_a_new_namer_knows_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one may have rested, or was lost. Programs go on to tell waits apart by numbers."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory.made_up_process.cache_clear()
    (machine,) = memory.java_machines()
    shop, lock = b"com/Shop$Sku", b"java/util/concurrent/locks/ReentrantLock$NonfairSync"
    symbol = memory.PART.pack(SYMBOL, 4 + len(lock)) + struct.pack("<I", len(lock)) + lock
    machine = machine.removesuffix(
        memory.PART.pack(SYMBOL, 4 + len(shop)) + struct.pack("<I", len(shop)) + shop
    )
    found = first_answer(machine + symbol, monkeypatch)
    assert (found.lock, found.kind) == ("[java]:java.util.concurrent.locks.ReentrantLock", "lock")
    assert found.hotspot and not found.is_provisional


def test_a_class_that_cannot_be_read_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory.made_up_process.cache_clear()
    (machine,) = memory.java_machines()
    found = first_answer(machine.removesuffix(b"com/Shop$Sku") + bytes(12), monkeypatch)
    assert found.is_provisional
