"""Tests of what one start leaves to the next in systemd's descriptor store, and when it is not adopted."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockd.config.reader import read_text
from lockd.config.schema import Config, default
from lockd.errors import LockdError
from lockd.kernel.manifest import Manifest
from lockd.load.settings import LoadSettings
from lockd.process import privileges
from lockd.sample.saved_state import SavedState
from lockd.service import store as store_module
from lockd.service.start import _resumed, asked_for, load_settings
from lockd.service.store import BOOT, TRIES, Store, key_of
from lockd.service.systemd import Systemd

MANIFEST = Manifest(1, (), (), (), (), {}, {})


class Keeper(Systemd):
    """A stand-in for systemd that keeps descriptors for the next start, in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.is_available = True
        self.left: dict[str, int] = {}

    def store_descriptor(self, name: str, fd: int) -> None:
        assert name not in self.left
        self.left[name] = os.dup(fd)

    def remove_descriptor(self, name: str) -> None:
        os.close(self.left.pop(name))

    def take_descriptors(self) -> dict[str, int]:
        return {name: os.dup(fd) for name, fd in self.left.items()}


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    one = Keeper()
    Store(one, "key").keep(MANIFEST, [os.memfd_create("map"), os.memfd_create("program")])
    yield one
    for fd in one.left.values():
        os.close(fd)


def adopted(keeper: Keeper, key: str = "key") -> Store | None:
    """Return the store of the next start, or None if that start does not adopt what was kept."""
    store = Store(keeper, key)
    return store if store.adopt() else None


def test_the_same_is_adopted_and_anything_else_let_go(keeper: Keeper) -> None:
    assert adopted(keeper)
    assert not adopted(keeper, "another")
    assert keeper.left == {}


def test_starts_that_never_serve_are_three_at_most(keeper: Keeper) -> None:
    for _ in range(TRIES):
        assert adopted(keeper)
    assert not adopted(keeper)


def test_kills_after_the_start_are_no_failures(keeper: Keeper) -> None:
    for _ in range(2 * TRIES):
        store = adopted(keeper)
        assert store
        store.note_started()


def test_errors_after_the_start_are_failures_unless_it_has_lasted(keeper: Keeper) -> None:
    """A sampler may fail each time because of what it finds in its maps, or in what was left to it."""
    for _ in range(2 * TRIES):
        store = adopted(keeper)
        assert store
        store.note_started()
        store.note_lasted()
        store.note_failed()
    for _ in range(TRIES - 1):
        store = adopted(keeper)
        assert store
        store.note_started()
        store.note_failed()
    assert not adopted(keeper)


def test_what_was_counted_may_be_let_go_alone(keeper: Keeper) -> None:
    first = Store(keeper, "key").counts_file()
    assert first is not None
    os.pwrite(first, b"counted", 0)
    store = adopted(keeper)
    assert store
    again = store.counts_file()
    assert again is not None
    assert os.pread(again, 7, 0) == b"counted"
    store.discard_counts()
    anew = store.counts_file()
    assert anew is not None
    assert os.fstat(anew).st_size == 0
    assert "counted" in keeper.left
    assert adopted(keeper)


def test_without_systemd_nothing_is_kept() -> None:
    keeper = Keeper()
    keeper.is_available = False
    store = Store(keeper, "key")
    store.keep(MANIFEST, [os.memfd_create("map")])
    assert store.counts_file() is None
    assert keeper.left == {}


SETTINGS = LoadSettings(("futex",), 64, 64, 64, 0, 1, "contention", "blocked", ())


def test_the_key_tells_settings() -> None:
    assert key_of(SETTINGS) == key_of(SETTINGS)
    assert key_of(SETTINGS) != key_of(replace(SETTINGS, entries=128))


def test_the_key_tells_sizes_as_they_are_configured() -> None:
    """The memory of a virtual machine can change; the maps of the last start are still as good then."""

    def key(text: str, memory_bytes: int) -> str:
        config = read_text(Config, text, "test")
        return key_of(asked_for(config, load_settings(config, memory_bytes=memory_bytes)))

    small, large = 20 * 10**9, 40 * 10**9
    assert load_settings(default(), memory_bytes=small) != load_settings(default(), memory_bytes=large)
    assert key("", small) == key("", large)
    numbers = [f"maps: {{{name}: {size}}}" for name in ("entries", "threads") for size in (64, 128)]
    assert len({key(text, small) for text in ("", *numbers, "maps: {stacks: 64}")}) == 6


def test_the_key_tells_what_the_kernel_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel allows more, a hook that was missing may be attached after a restart."""
    values = {BOOT: "boot", "sys/kernel/kptr_restrict": "2"}
    keys = set()
    for name, value in ((BOOT, "boot"), ("sys/kernel/kptr_restrict", "1"), (BOOT, "another")):
        values[name] = value
        for file, text in values.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
        keys |= {key_of(SETTINGS, tmp_path), key_of(SETTINGS, tmp_path)}
    assert len(keys) == 3
    monkeypatch.setattr(privileges, "capabilities", lambda: {"CAP_BPF"})
    assert key_of(SETTINGS, tmp_path) not in keys


def test_what_was_kept_stays_if_this_start_has_no_descriptor_left(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_identity", fail)
        with pytest.raises(OSError, match="Too many open files"):
            Store(keeper, "key").adopt()
    assert adopted(keeper)


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(ValueError("no sense"), False), (LockdError("passes"), True), (MemoryError(), True)],
)
def test_counts_are_discarded_only_if_they_make_no_sense(
    keeper: Keeper, error: Exception, is_kept: bool
) -> None:
    sampler, errors = object(), [error]

    def begin(saved: SavedState) -> Any:
        def take_over() -> None:
            if errors:
                raise errors.pop()

        return SimpleNamespace(take_over=take_over, it=sampler)

    first = Store(keeper, "key").counts_file()
    assert first is not None
    os.pwrite(first, b"counted", 0)
    store = adopted(keeper)
    assert store
    with pytest.raises(type(error)) if is_kept else contextlib.nullcontext():
        assert cast(Any, _resumed(begin, store)).it is sampler
    counts = store.counts_file()
    assert counts is not None
    assert (os.pread(counts, 7, 0) == b"counted") == is_kept
