"""Tests of what lockd says about type information of the kernel that libbpf cannot load."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockd.errors import HostError, LockdError
from lockd.kernel import btf
from lockd.kernel.btf import KernelTypes
from lockd.load import doctor

OF_OLD_VERSIONS = 2**64 - errno.ESRCH
"""What libbpf before 1.0 returns in place of an address if it cannot load the type information."""


@pytest.fixture(params=[OF_OLD_VERSIONS, None])
def refusing(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the kernel's type information, which libbpf cannot load."""
    file = tmp_path / "vmlinux"
    file.write_bytes(b"types of another version")
    library = SimpleNamespace(btf__load_vmlinux_btf=lambda: request.param)
    monkeypatch.setattr(btf, "VMLINUX", file)
    monkeypatch.setattr(btf, "libbpf", lambda: library)
    ctypes.set_errno(errno.ESRCH)
    return file


def test_types_that_libbpf_does_not_know_are_no_passing_error(refusing: Path) -> None:
    with pytest.raises(HostError, match=rf"{refusing}: .*rule: libbpf is as new as the kernel, .* 1\.0 or"):
        KernelTypes()


def test_a_lack_of_memory_is_a_passing_error(refusing: Path) -> None:
    ctypes.set_errno(errno.ENOMEM)
    with pytest.raises(LockdError) as raised:
        KernelTypes()
    assert raised.value.exit_code == 1


def test_doctor_says_it_and_goes_on(
    refusing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ensure_tracefs", lambda: None)  # it may mount
    assert doctor.report() == 3
    printed = capsys.readouterr().out
    assert f"BTF         no: {refusing}: libbpf cannot read its content" in printed
    assert "\ntracefs     yes" in printed
    assert "nothing can run here" in printed
