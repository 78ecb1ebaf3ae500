"""User-space locks are named by the object and the offset that their address has in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockd.names.locks import user_locks
from lockd.names.locks.locking_code import Frame
from lockd.names.locks.user_locks import NAMELESS, UserNames, java_lock
from lockd.names.protocol import ANON
from lockd.names.runtimes.hotspot import JavaWait
from lockd.names.unwind.capture import Capture
from tests.support.small_procfs import Procfs

MAPS = """\
555000000000-555000001000 r--p 00000000 08:01 10 /usr/bin/my server
555000001000-555000002000 r-xp 00001000 08:01 10 /usr/bin/my server
555000002000-555000003000 rw-p 00002000 08:01 10 /usr/bin/my server
555000003000-555000009000 rw-p 00000000 00:00 0
555010000000-555010021000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000021000 rw-p 00000000 00:00 0
7f0010000000-7f0010028000 r-xp 00000000 08:01 20 /usr/lib/libc.so.6 (deleted)
7f0010028000-7f0010030000 rw-p 00028000 08:01 20 /usr/lib/libc.so.6 (deleted)
7f0010030000-7f001003d000 rw-p 00000000 00:00 0
7f0010040000-7f0010041000 rw-s 00000000 00:01 30 /memfd:pool (deleted)
7f0010050000-7f0010051000 rw-s 00000000 00:01 31 /dev/shm/sem.x
7f0010060000-7f0010061000 rw-s 00000000 00:01 32 /SYSV00000000 (deleted)
7f0010070000-7f0010071000 rw-s 00000000 00:01 33 /dev/zero (deleted)
7f0010078000-7f0010079000 rw-p 00000000 00:10 36 /anon_hugepage (deleted)
7f0010080000-7f0010081000 rw-s 00000000 08:01 34 /var/lib/shop/orders.db
7f0010081000-7f0010091000 rw-p 00000000 00:00 0
7f00100a0000-7f00100a1000 r--p 00000000 08:01 35 /usr/lib/locale/C.utf8/LC_CTYPE
7f00100a1000-7f00100b1000 rwxp 00000000 00:00 0
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
"""


def name_of(procfs: Path, address: int) -> str:
    """Return the name of a lock of process 7, of which nothing was captured."""
    return UserNames(procfs).name_lock(7, 7, address, "other", None).lock


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (0x555000000000, "my server+0x0"),
        (0x555000002040, "my server+0x2040"),
        (0x555000003008, "my server+0x3008"),  # zero-initialised: behind the file's mapping
        (0x555000009000, ANON),
        (0x555010000010, ANON),
        (0x7F0000000010, ANON),
        (0x7F0010028100, "libc.so.6+0x28100"),
        (0x7F001003CFFF, "libc.so.6+0x3cfff"),
        (0x7F0010040000, ANON),
        (0x7F0010050000, ANON),
        (0x7F0010060000, ANON),
        (0x7F0010070000, ANON),
        (0x7F0010078010, ANON),
        (0x7F0010080010, "orders.db+0x10"),
        (0x7F0010081010, ANON),  # a data file has no variables behind it
        (0x7F00100A1010, ANON),
        (0x7FFC00000010, ANON),
        (0, ANON),
        (2**64 - 1, ANON),
    ],
)
def test_the_name_of_an_address(tmp_path: Path, address: int, name: str) -> None:
    Procfs(tmp_path).add(7, b"server")
    (tmp_path / "7/maps").write_text(MAPS)
    assert name_of(tmp_path, address) == name


def test_two_copies_of_an_object_are_not_one(tmp_path: Path) -> None:
    maps = (
        "1000-2000 rw-p 00000000 08:01 10 /lib/a.so\n"
        "5000-6000 rw-p 00000000 08:01 11 /lib/b.so\n"
        "9000-a000 rw-p 00000000 08:01 10 /lib/a.so\n"
    )
    Procfs(tmp_path).add(7, b"server")
    (tmp_path / "7/maps").write_text(maps)
    assert name_of(tmp_path, 0x9010) == "a.so+0x10"


def test_a_copy_of_an_object_below_anonymous_memory_is_another(tmp_path: Path) -> None:
    maps = (
        "1000-2000 r--p 00000000 08:01 10 /lib/a.so\n"
        "2000-3000 rw-p 00000000 00:00 0\n"
        "3000-4000 r--p 00000000 08:01 10 /lib/a.so\n"
        "4000-5000 r-xp 00001000 08:01 10 /lib/a.so\n"
        "5000-6000 rw-p 00000000 00:00 0\n"
        "6000-7000 rw-p 00003000 08:01 10 /lib/a.so\n"
    )
    Procfs(tmp_path).add(7, b"server")
    (tmp_path / "7/maps").write_text(maps)
    assert [name_of(tmp_path, address) for address in (0x1010, 0x4010, 0x6010)] == [
        "a.so+0x10", "a.so+0x1010", "a.so+0x3010",
    ]  # fmt: skip


def test_a_dead_process_and_an_empty_one_have_no_names(tmp_path: Path) -> None:
    procfs = Procfs(tmp_path)
    assert name_of(tmp_path, 0x1000) == ANON
    procfs.add(7, b"zombie")
    (tmp_path / "7/maps").write_text("")
    assert name_of(tmp_path, 0x1000) == ANON


@pytest.mark.parametrize(
    ("file", "name"), [(b"\xff.so", "\\xff.so"), (b"a\rb", "a?b"), ("\u2028.so".encode(), "?.so")]
)
def test_file_names_can_be_anything(tmp_path: Path, file: bytes, name: str) -> None:
    Procfs(tmp_path).add(7, b"server")
    (tmp_path / "7/maps").write_bytes(b"1000-2000 rw-p 00000000 08:01 10 /lib/%s\n" % file)
    assert name_of(tmp_path, 0x1010) == f"{name}+0x10"


def test_a_lock_of_java_behind_code_that_no_map_names_is_called_by_its_class() -> None:
    """The code without a name may be where the thread waits for the lock; the caller of that code is not."""
    wait = JavaWait("com.shop.Registry", "lock", "monitor")
    method, caller = (Frame("[jit]", name, f"[jit]:{name}") for name in ("Shop.add", "Shop.main"))
    assert java_lock(wait, [method, NAMELESS, caller]).lock == "[jit]:Shop.add"
    behind = java_lock(wait, [NAMELESS, caller])
    assert (behind.lock, behind.site, behind.kind) == ("[java]:com.shop.Registry", "", "lock")


PARK = "parking_lot_core::parking_lot::park"


@pytest.mark.parametrize(
    ("functions", "kind"),
    [
        ((PARK, "parking_lot::condvar::Condvar::wait_until_internal"), "cond"),
        ((PARK, "parking_lot::raw_mutex::RawMutex::lock_slow"), "lock"),
    ],
)
def test_a_thread_on_a_word_of_its_own_may_next_wait_there_for_another_lock(
    functions: tuple[str, ...], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sleeping thread waits for is judged by too few registers to be certain."""
    frames = [Frame("app", name, f"app:{name}") for name in ("syscall", *functions, "app::work")]
    capture = Capture((0,) * 17, b"", (), 1)
    monkeypatch.setattr(UserNames, "_frames", lambda *_: frames)
    monkeypatch.setattr(user_locks, "unwind", lambda *_: range(len(frames)))
    monkeypatch.setattr(user_locks, "system_call", lambda *_: [b"202", b"0x1000", *[b"0x0"] * 7])
    monkeypatch.setattr(user_locks, "read_capture", lambda *_: capture)
    Procfs(tmp_path).add(7, b"app")
    names = UserNames(tmp_path)
    found = names.name_lock(7, 7, 0x1000, "cond", capture)
    assert (found.kind, found.site, found.is_parked) == (kind, "app:app::work", True)
    assert not found.is_reused and not found.is_provisional
    assert names.name_lock_of_sleeper(7, 7, 0x1000, "cond", 1).is_provisional
