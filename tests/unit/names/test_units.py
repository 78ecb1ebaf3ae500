"""Cgroups to units: by path, by /proc/PID/cgroup, and by the kernel's own id on this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockd.names.labels.units import Units, unit_of, unit_of_cgroup_file
from tests.support.small_procfs import V1_MOUNTS, Procfs

ID = "0123456789abcdef" * 4
SHORT = ID[:12]


OTHER_ID = "fedcba9876543210" * 4
USER = "/user.slice/user-1000.slice/user@1000.service"
POD = "pod01234567_89ab_cdef_0123_456789abcdef"


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        # systemd's system manager
        ("/system.slice/nginx.service", "nginx.service"),
        ("/a.slice/a-b.slice/a-b-c.slice/nginx.service", "nginx.service"),
        ("/init.scope", "init.scope"),
        ("/system.slice/system-getty.slice/getty@tty1.service", "getty@tty1.service"),
        (
            r"/system.slice/system-systemd\x2dcryptsetup.slice/systemd-cryptsetup@luks\x2d1.service",
            r"systemd-cryptsetup@luks\x2d1.service",
        ),
        ("/system.slice/run-rc0ffee.scope", "run-rc0ffee.scope"),
        ("/user.slice/user-1000.slice/session-3.scope", "session-3.scope"),
        # what a service makes of the part that is its own
        ("/system.slice/nginx.service/worker/1", "nginx.service"),
        ("/system.slice/delegated.service/mariadb.service", "delegated.service"),
        ("/system.slice/postgresql.slice/pg@14-main.service/supervisor", "pg@14-main.service"),
        ("/system.slice/slurmstepd.scope/job_12/step_0/user/task_0", "slurmstepd.scope"),
        # a user's manager
        (f"{USER}/app.slice/mariadb.service", "user-1000.slice/mariadb.service"),
        (f"{USER}/app.slice/app-gnome-firefox-12345.scope", "user-1000.slice/app-gnome-firefox-12345.scope"),
        (f"{USER}/session.slice/dbus.service/payload", "user-1000.slice/dbus.service"),
        (f"{USER}/session.slice/dbus.service/mariadb.service", "user-1000.slice/dbus.service"),
        (f"{USER}/init.scope", "user@1000.service"),
        (USER, "user@1000.service"),
        # in no unit
        ("/", ""),
        ("", ""),
        ("/user.slice", ""),
        ("/user.slice/user-1000.slice", ""),
        ("/made-by-hand/worker", ""),
        ("/.service", ""),
        ("/service", ""),
        ("/nginx.service.d", ""),
        # docker, containerd, CRI-O, Kubernetes: systemd's cgroups and their own
        (f"/system.slice/docker-{ID}.scope", SHORT),
        (f"/docker/{ID}", SHORT),
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{POD}.slice/crio-{ID}.scope", SHORT),
        (f"/kubepods.slice/kubepods-{POD}.slice/cri-containerd-{ID}.scope", SHORT),
        (f"/kubepods/burstable/{POD}/{ID}", SHORT),
        (f"/kubepods/besteffort/{POD}/crio-conmon-{ID}", SHORT),
        (f"/system.slice/containerd.service/kubepods-burstable-{POD}.slice:cri-containerd:{ID}", SHORT),
        (f"/system.slice/containerd.service/kubepods-pod1/crio-{ID}", SHORT),
        (f"/default/{ID}", SHORT),
        (f"/docker/{ID[:-1]}", ""),
        (f"/docker/{ID}0", ""),
        (f"/kubepods/burstable/{POD}", ""),
        # podman
        (f"/machine.slice/libpod-{ID}.scope/container", SHORT),
        (f"/machine.slice/libpod-conmon-{ID}.scope", SHORT),
        (
            f"{USER}/user.slice/user-libpod_pod_{OTHER_ID}.slice/libpod-{ID}.scope/container",
            f"user-1000.slice/{SHORT}",
        ),
        (f"{USER}/docker-{ID}.scope", f"user-1000.slice/{SHORT}"),
        (f"/libpod_parent/libpod-{ID}", SHORT),
        (f"/system.slice/{ID}-61b0c2a7e9d4f518.service", SHORT),
        (f"/system.slice/shop.service/libpod-payload-{ID}", "shop.service"),
        ("/system.slice/shop.service/runtime", "shop.service"),
        # whole systems
        ("/lxc.payload.web", "lxc:web"),
        ("/lxc.payload.web/system.slice/nginx.service", "lxc:web"),
        ("/lxc.monitor.web", "lxc:web"),
        ("/lxc/101/ns/init.scope", "lxc:101"),
        ("/lxc", ""),
        (r"/machine.slice/machine-my\x2dbox.scope/payload/init.scope", r"machine-my\x2dbox.scope"),
        (
            "/machine.slice/systemd-nspawn@web.service/payload/system.slice/a.service",
            "systemd-nspawn@web.service",
        ),
        # containers in containers, and services in them
        (f"/docker/{ID}/system.slice/inner.service", SHORT),
        (f"/system.slice/docker-{ID}.scope/docker/{OTHER_ID}", SHORT),
        (f"/docker/{ID}/kubelet.slice/kubelet-kubepods.slice/cri-containerd-{OTHER_ID}.scope", SHORT),
        (f"/machine.slice/machine-web.scope/docker/{ID}", "machine-web.scope"),
        # as seen from another cgroup namespace, and when it is removed
        ("/../../system.slice/nginx.service", "nginx.service"),
        (f"/../{ID}", SHORT),
        ("/system.slice/nginx.service (deleted)", "nginx.service"),
        (f"/docker/{ID} (deleted)", SHORT),
    ],
)
def test_the_unit_of_a_path(path: str, unit: str) -> None:
    assert unit_of(path) == unit


@pytest.mark.parametrize(
    ("lines", "unit"),
    [
        (["0::/system.slice/a.service"], "a.service"),
        (["5:memory:/b.service", "1:name=systemd:/system.slice/a.service", "0::/"], "a.service"),
        (["5:memory:/b.service", "1:name=systemd:/", "0::/system.slice/a.service"], "a.service"),
        (["5:memory:/docker/" + ID, "1:name=systemd:/", "0::/"], SHORT),
        (["1:name=systemd:/docker/" + ID, "0::/system.slice/docker.service"], SHORT),
        (["1:name=systemd:/system.slice/docker.service", "4:memory:/docker/" + ID], SHORT),
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


def test_where_no_cgroups_are_mounted_the_process_is_asked(tmp_path: Path) -> None:
    procfs = Procfs(tmp_path, mountinfo="20 1 0:5 / /proc rw - proc proc rw\n")
    procfs.add(7, b"a", cgroup=b"0::/system.slice/a.service\n")
    assert Units(tmp_path).unit(1, 7) == "a.service"
    assert Units(tmp_path).unit(1, 8) == ""
    assert Units(tmp_path / "nowhere").unit(1, 7) == ""


def test_names_need_not_be_text(tmp_path: Path) -> None:
    """Anybody who may make cgroups or mounts may call them what they like."""
    procfs = Procfs(tmp_path)
    mounts = tmp_path / "self/mountinfo"
    mounts.write_bytes(mounts.read_bytes() + b"31 1 0:26 / /mnt/\xff\xfe rw - fuse x rw\n")
    procfs.add(7, b"a", cgroup=b"4:memory:/system.slice/\xff.service\n0::/\n")
    procfs.add(8, b"a", cgroup="4:memory:/a.slice/\x1b[31m\u2028.service\n0::/\n".encode())
    assert Units(tmp_path).unit(1, 7) == r"\xff.service"
    assert Units(tmp_path).unit(1, 8) == "?[31m?.service"


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


@pytest.fixture
def only_v2(tmp_path: Path) -> Procfs:
    """A host that has this host's unified hierarchy alone."""
    return Procfs(tmp_path, mountinfo=f"41 31 0:38 / {cgroup2()} rw - cgroup2 cgroup2 rw\n")


@pytest.fixture
def cgroups() -> Iterator[list[Path]]:
    """Three services' cgroups of this host."""
    made = [cgroup2() / f"lockd-test-{number}.service" for number in range(3)]
    try:
        for directory in made:
            directory.mkdir()
    except OSError as error:
        pytest.skip(f"host: no cgroup can be made here: {error.strerror}")
    yield made
    for directory in made:
        if directory.exists():
            directory.rmdir()


def unit_by_id(units: Units, cgroup: Path) -> str:
    unit = units.unit(cgroup.stat().st_ino, 0)
    if unit == "" and os.geteuid():
        pytest.skip("host: only root may open a cgroup by its id")
    return unit


def test_a_removed_cgroup_keeps_its_name_and_its_successor_has_its_own(
    only_v2: Procfs, cgroups: list[Path]
) -> None:
    units, inner = Units(only_v2.root), cgroups[0] / "payload"
    inner.mkdir()
    ids = [inner.stat().st_ino]
    assert unit_by_id(units, inner) == cgroups[0].name
    inner.rmdir()
    assert units.unit(ids[0], 0) == cgroups[0].name
    # The process went elsewhere before its cgroup was removed: what it did there it did there.
    only_v2.add(7, b"a", cgroup=b"0::/system.slice/elsewhere.service\n")
    assert units.unit(ids[0], 7) == cgroups[0].name
    inner.mkdir()
    assert inner.stat().st_ino not in ids
    assert unit_by_id(units, inner) == cgroups[0].name
    inner.rmdir()


def test_of_a_cgroup_that_was_removed_unseen_the_process_is_asked(
    only_v2: Procfs, cgroups: list[Path]
) -> None:
    number = cgroups[0].stat().st_ino
    cgroups[0].rmdir()
    units = Units(only_v2.root)
    assert units.unit(number, 7) == ""
    only_v2.add(7, b"a", cgroup=b"0::/system.slice/a.service (deleted)\n")
    assert units.unit(number, 7) == "a.service"


def test_the_cgroups_asked_for_last_are_remembered(only_v2: Procfs, cgroups: list[Path]) -> None:
    units, numbers = Units(only_v2.root, max_known=2), [cgroup.stat().st_ino for cgroup in cgroups]
    for cgroup in (cgroups[0], cgroups[1], cgroups[0], cgroups[2]):
        assert unit_by_id(units, cgroup) == cgroup.name
    for cgroup in cgroups:
        cgroup.rmdir()
    assert [units.unit(number, 0) for number in numbers] == [cgroups[0].name, "", cgroups[2].name]


def test_where_both_versions_are_in_use_the_process_knows_more(tmp_path: Path, cgroups: list[Path]) -> None:
    """A container of v1 is, in the unified hierarchy, in the cgroup of what started it."""
    both = V1_MOUNTS + f"41 1 0:38 / {cgroup2()} rw - cgroup2 cgroup2 rw\n"
    procfs, number = Procfs(tmp_path, mountinfo=both), cgroups[0].stat().st_ino
    procfs.add(7, b"a", cgroup=f"1:name=systemd:/docker/{ID}\n0::/{cgroups[0].name}\n".encode())
    units = Units(procfs.root)
    assert units.unit(number, 7) == SHORT
    procfs.remove(7)
    assert units.unit(number, 7) == unit_by_id(units, cgroups[0]) == cgroups[0].name
