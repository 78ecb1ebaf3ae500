"""The units of cgroups: told by /proc/PID/cgroup, and by the kernel's id of a cgroup of this host."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockd.names.labels.cgroup_paths import Unit
from lockd.names.labels.processes import Processes
from lockd.names.labels.units import Units
from tests.support.cgroups import unified_hierarchy
from tests.support.container_paths import BURSTABLE_PATH, CONTAINERS, ID, MONITORS, SHORT, UID
from tests.support.small_procfs import V1_MOUNTS, Procfs


def test_with_v1_controllers_the_process_is_asked(tmp_path: Path) -> None:
    procfs = Procfs(tmp_path)
    procfs.add(7, b"a", cgroup=b"4:memory:/system.slice/a.service\n0::/\n")
    units = Units(tmp_path)
    assert units.unit(1, 7) == "a.service"
    assert units.unit(1, 8) == ""
    # All processes have one id here, that of the root: the unit must not be remembered by this id.
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


@pytest.fixture(scope="module")
def cgroup2() -> Iterator[Path]:
    """Yield the directory of this host's unified hierarchy."""
    with unified_hierarchy() as place:
        yield place


@pytest.fixture
def own(cgroup2: Path) -> Iterator[Path]:
    """Yield a cgroup of this host for one test, which makes others in it; all of them are removed."""
    directory = cgroup2 / f"lockd-test-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        pytest.skip(f"host: no cgroup can be made here: {error.strerror}")
    yield directory
    for below, _, _ in os.walk(directory, topdown=False):
        os.rmdir(below)


@pytest.mark.parametrize("name", ["lockd-test.service", b"\xff-lockd-test.scope", "lockd-test"])
def test_the_kernels_id_is_a_unit(own: Path, name: str | bytes) -> None:
    """The id that a program notes for a thread is the inode of its cgroup's directory."""
    directory = own / os.fsdecode(name)
    directory.mkdir()
    units, number = Units(), directory.stat().st_ino
    unit = units.unit(number, 0)
    directory.rmdir()
    if unit == "" and os.geteuid():
        pytest.skip("host: only root may open a cgroup by its id")
    expected = os.fsencode(name).decode("utf-8", "backslashreplace")
    assert unit == (expected if "." in expected else "")
    assert units.unit(number, 0) == unit  # remembered, though the cgroup is gone
    assert Units().unit(number, 0) == ""


@pytest.fixture
def only_v2(tmp_path: Path, cgroup2: Path) -> Procfs:
    """Return the procfs of a host that has only the unified hierarchy of this host."""
    return Procfs(tmp_path, mountinfo=f"41 31 0:38 / {cgroup2} rw - cgroup2 cgroup2 rw\n")


@pytest.fixture
def cgroups(own: Path) -> list[Path]:
    """Return cgroups of three services on this host."""
    made = [own / f"lockd-test-{number}.service" for number in range(3)]
    for directory in made:
        directory.mkdir()
    return made


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
    # The process went elsewhere before its cgroup was removed: what it did before counts for the old unit.
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


def test_where_both_versions_are_in_use_the_process_knows_more(
    tmp_path: Path, cgroup2: Path, cgroups: list[Path]
) -> None:
    """In the unified hierarchy, a container of v1 is in the cgroup of what started it."""
    both = V1_MOUNTS + f"41 1 0:38 / {cgroup2} rw - cgroup2 cgroup2 rw\n"
    procfs, number = Procfs(tmp_path, mountinfo=both), cgroups[0].stat().st_ino
    procfs.add(7, b"a", cgroup=f"1:name=systemd:/docker/{ID}\n0::/{cgroups[0].name}\n".encode())
    units = Units(procfs.root)
    assert units.unit(number, 7) == SHORT
    procfs.remove(7)
    assert units.unit(number, 7) == unit_by_id(units, cgroups[0]) == cgroups[0].name


@pytest.mark.parametrize("is_gone", [True, False])
def test_where_both_versions_are_in_use_an_ended_process_stays_in_its_container(
    tmp_path: Path, cgroup2: Path, cgroups: list[Path], is_gone: bool
) -> None:
    """Of such a process, the unified hierarchy still knows the cgroup of what started the container."""
    both = V1_MOUNTS + f"41 1 0:38 / {cgroup2} rw - cgroup2 cgroup2 rw\n"
    procfs, number = Procfs(tmp_path, mountinfo=both), cgroups[0].stat().st_ino
    cgroup = f"1:name=systemd:/docker/{ID}\n0::/{cgroups[0].name}\n".encode()
    processes = Processes(Units(procfs.root), procfs.root)
    for tgid in (7, 8):
        procfs.add(tgid, b"sh", cgroup=cgroup)
    assert processes.learn(7, number, b"sh", kernel_thread=False) == (SHORT, "sh")
    for tgid in (7, 8):
        procfs.end_leader(tgid)
        if is_gone:
            procfs.remove(tgid)
    assert processes.learn(7, number, b"true", kernel_thread=False) == (SHORT, "true")  # renamed by exec
    assert processes.learn(8, number, b"true", kernel_thread=False) == (cgroups[0].name, "true")  # never seen


@pytest.mark.parametrize(("path", "unit"), {**CONTAINERS, **MONITORS}.items())
def test_what_a_real_cgroup_says(only_v2: Procfs, own: Path, path: str, unit: Unit) -> None:
    cgroup = own / path.replace("../", "").lstrip("/")
    cgroup.mkdir(parents=True)
    units = Units(only_v2.root)
    assert unit_by_id(units, cgroup) == unit.name
    assert units.known == {unit.name: unit}


@pytest.mark.parametrize("mounts", ["", V1_MOUNTS], ids=["v2", "v1"])
@pytest.mark.parametrize(("path", "unit"), {**CONTAINERS, **MONITORS}.items())
def test_what_the_cgroup_of_a_process_says(tmp_path: Path, mounts: str, path: str, unit: Unit) -> None:
    procfs = Procfs(tmp_path, mountinfo=mounts)
    hierarchies = ("4:memory:", "1:name=systemd:") if mounts else ("0::",)
    procfs.add(7, b"a", cgroup="".join(f"{each}{path}\n" for each in hierarchies).encode())
    units = Units(tmp_path)
    assert units.unit(0, 7) == unit.name
    assert units.known == {unit.name: unit}


@pytest.mark.parametrize(
    ("container", "beside"),
    [
        (f"{BURSTABLE_PATH}/crio-{ID}.scope/container", f"{BURSTABLE_PATH}/crio-conmon-{ID}.scope"),
        (f"{BURSTABLE_PATH}/crio-{ID}.scope/container", f"/system.slice/crio-conmon-{ID}.scope"),
        (f"/kubepods/besteffort/pod{UID}/crio-{ID}", f"/kubepods/besteffort/pod{UID}/crio-conmon-{ID}"),
        (f"/kubepods/besteffort/pod{UID}/crio-{ID}", f"/system.slice/crio-conmon-{ID}.scope"),
        (f"/machine.slice/libpod-{ID}.scope/container", f"/machine.slice/libpod-conmon-{ID}.scope"),
        (f"/machine.slice/libpod-{ID}.scope/container", f"/system.slice/{ID}-61b0c2a7e9d4f518.service"),
        (f"/libpod_parent/libpod-{ID}", f"/system.slice/{ID}-61b0c2a7e9d4f518.service"),
        (f"/system.slice/shop.service/libpod-payload-{ID}", "/system.slice/shop.service/runtime"),
    ],
)
def test_what_runs_beside_a_container_takes_nothing_from_it(
    tmp_path: Path, container: str, beside: str
) -> None:
    procfs, unit = Procfs(tmp_path, mountinfo=""), CONTAINERS[container]
    for order in ((container, beside), (beside, container)):
        units = Units(tmp_path)
        for path in order:
            procfs.add(7, b"a", cgroup=f"0::{path}\n".encode())
            assert units.unit(0, 7) == unit.name
        assert units.known == {unit.name: unit}


def test_a_service_that_moves_is_where_it_was_seen_last(tmp_path: Path) -> None:
    procfs, units = Procfs(tmp_path, mountinfo=""), Units(tmp_path)
    for place in ("system.slice", "shop.slice", "system.slice"):
        procfs.add(7, b"a", cgroup=f"0::/{place}/a.service\n".encode())
        units.unit(0, 7)
        assert units.known == {"a.service": Unit("a.service", slice=place)}
    units.keep({"b.service"})
    assert units.known == {}
    units.unit(0, 7)
    units.keep({"a.service"})
    assert units.known.keys() == {"a.service"}
