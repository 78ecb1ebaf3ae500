"""Files in memory can be made on every kernel, also where a host allows no executable ones."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from lockd.names.objects.function_exits import FunctionExits, find_exits
from lockd.process import memory
from tests.needs import needs

ROOT = Path(__file__).parents[3]
NOEXEC_SEAL = 0x8
CREATE = os.memfd_create


def on_a_hardened_host(name: str, flags: int = os.MFD_CLOEXEC) -> int:
    """Answer as Linux 6.5 with vm.memfd_noexec=2 does. (Since 6.6 the kernel adds the flag itself.)"""
    if not flags & NOEXEC_SEAL:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return CREATE(name, flags & ~NOEXEC_SEAL)


def before_6_3(name: str, flags: int = os.MFD_CLOEXEC) -> int:
    """Answer as a kernel that does not know the flag."""
    if flags & NOEXEC_SEAL:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return CREATE(name, flags)


@pytest.mark.parametrize("kernel", [on_a_hardened_host, before_6_3])
def test_a_file_is_made_on_every_kernel(kernel: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", kernel)
    with open(memory.create_file("made"), "w+b", buffering=0) as file:
        assert os.readlink(f"/proc/self/fd/{file.fileno()}") == "/memfd:made (deleted)"
        assert not os.get_inheritable(file.fileno())
        file.write(b"text")
        assert os.pread(file.fileno(), 10, 0) == b"text"


def test_nobody_can_execute_it() -> None:
    with open(memory.create_file("made"), "w+b", buffering=0) as file:
        if not is_known():
            pytest.skip("host: Linux before 6.3 knows no such files")
        assert not os.fstat(file.fileno()).st_mode & 0o111
        with pytest.raises(PermissionError):
            os.fchmod(file.fileno(), stat.S_IRWXU)


def is_known() -> bool:
    try:
        os.close(CREATE("known", NOEXEC_SEAL))
    except OSError:
        return False
    return True


def test_a_lack_of_descriptors_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(OSError, match="Too many open files"):
        memory.create_file("made")


@needs("objdump")
def test_another_user_can_read_it() -> None:
    """objdump runs as the user nobody if lockd runs as root, and opens its standard input by a path."""
    assert find_exits(b"\x90\xc3", 0x1000) == FunctionExits((0x1001,), ())


def test_every_file_in_memory_is_made_there() -> None:
    others = [
        path for path in sorted((ROOT / "lockd").rglob("*.py")) if "os.memfd_create" in path.read_text()
    ]
    assert others == [ROOT / "lockd/process/memory.py"]
