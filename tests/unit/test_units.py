"""Cgroups to units: by path, by /proc/PID/cgroup, and by the kernel's own id on this host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_procfs import Procfs

from lockd.names.units import Units, unit_of, unit_of_cgroup_file

ID = "0123456789abcdef" * 4
SHORT = ID[:12]


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/system.slice/nginx.service", "nginx.service"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.scope", "app-x.scope"),
        ("/system.slice/nginx.service/worker/1", "nginx.service"),
        ("/init.scope", "init.scope"),
        ("/system.slice/system-getty.slice/getty@tty1.service", "getty@tty1.service"),
        ("/", ""),
        ("", ""),
        ("/user.slice", ""),
        ("/.service", ""),
        ("/service", ""),
        (f"/system.slice/docker-{ID}.scope", SHORT),
        (f"/docker/{ID}", SHORT),
        (f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope", SHORT),
        (f"/machine.slice/libpod-{ID}.scope/container", SHORT),
        (f"/kubepods/burstable/pod1/{ID}", SHORT),
        (f"/system.slice/containerd.service/kubepods-pod1/crio-{ID}", SHORT),
        (f"/docker/{ID}/system.slice/inner.service", "inner.service"),
        (f"/docker/{ID[:-1]}", ""),
    ],
)
def test_the_unit_of_a_path(path: str, unit: str) -> None:
    assert unit_of(path) == unit


@pytest.mark.parametrize(
    ("lines", "unit"),
    [
        (["0::/system.slice/a.service"], "a.service"),
        (["5:memory:/b.service", "1:name=systemd:/system.slice/a.service", "0::/"], "a.service"),
        (["5:memory:/docker/" + ID, "1:name=systemd:/", "0::/"], SHORT),
        (["5:cpu,cpuacct:/x:y/a.service"], "a.service"),
        (["nonsense", ""], ""),
        ([], ""),
    ],
)
def test_the_unit_in_a_cgroup_file(lines: list[str], unit: str) -> None:
    assert unit_of_cgroup_file(lines) == unit


def test_with_v1_controllers_the_process_is_asked(tmp_path: Path) -> None:
    procfs = Procfs(tmp_path)
    procfs.add(7, b"a", cgroup=b"4:memory:/system.slice/a.service\n0::/\n")
    units = Units(tmp_path)
    assert units.unit(1, 7) == "a.service"
    assert units.unit(1, 8) == ""
    # One id, the root's, for all of them: it is not the id that is remembered.
    procfs.add(8, b"b", cgroup=b"4:memory:/system.slice/b.service\n0::/\n")
    assert units.unit(1, 8) == "b.service"


def test_without_any_cgroups_there_is_no_unit(tmp_path: Path) -> None:
    procfs = Procfs(tmp_path, mountinfo="20 1 0:5 / /proc rw - proc proc rw\n")
    procfs.add(7, b"a", cgroup=b"0::/system.slice/a.service\n")
    assert Units(tmp_path).unit(1, 7) == ""
    assert Units(tmp_path / "nowhere").unit(1, 7) == ""


def test_names_need_not_be_utf8(tmp_path: Path) -> None:
    """Anybody who may make cgroups or mounts may call them what they like."""
    procfs = Procfs(tmp_path)
    mounts = tmp_path / "self/mountinfo"
    mounts.write_bytes(mounts.read_bytes() + b"31 1 0:26 / /mnt/\xff\xfe rw - fuse x rw\n")
    procfs.add(7, b"a", cgroup=b"4:memory:/system.slice/\xff.service\n0::/\n")
    unit = Units(tmp_path).unit(1, 7)
    assert unit.encode() == rb"\xff.service"


def cgroup2() -> Path:
    """Where this host has the unified hierarchy."""
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields = line.split()
        if "cgroup2" in fields:
            return Path(fields[4])
    pytest.skip("host: has no cgroup2 file system")


@pytest.mark.parametrize("name", ["lockd-test.service", b"\xff-lockd-test.scope", "lockd-test"])
def test_the_kernels_id_is_a_unit(name: str | bytes) -> None:
    """The id that a program notes for a thread is the inode of its cgroup's directory."""
    directory = os.path.join(os.fsencode(cgroup2()), os.fsencode(name))
    try:
        os.mkdir(directory)
    except OSError as error:
        pytest.skip(f"host: no cgroup can be made here: {error.strerror}")
    try:
        units, number = Units(), os.stat(directory).st_ino
        try:
            os.close(os.open(directory, os.O_PATH))
            unit = units.unit(number, os.getpid())
        finally:
            os.rmdir(directory)
        if unit == "" and os.geteuid():
            pytest.skip("host: only root may open a cgroup by its id")
        expected = os.fsencode(name).decode("utf-8", "backslashreplace")
        assert unit == (expected if "." in expected else units.unit(0, os.getpid()))
        assert units.unit(number, os.getpid()) == unit  # remembered, though the cgroup is gone
        assert Units().unit(number, 0) == ""
    finally:
        if os.path.isdir(directory):
            os.rmdir(directory)
