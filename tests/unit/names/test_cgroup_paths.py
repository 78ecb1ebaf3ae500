"""The units in paths of cgroups, and what paths say about them: services, and containers of every runtime."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockd.names.labels.cgroup_paths import (
    NO_UNIT,
    RUNTIMES,
    Unit,
    printable_path,
    unit_of,
    unit_of_cgroup_file,
)
from tests.support.container_paths import CONTAINERS, ID, MONITORS, OTHER_ID, POD, SHORT, UID, USER


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
        ("/system.slice/mnt-data.mount", "mnt-data.mount"),
        (r"/system.slice/dev-disk-by\x2duuid-1.swap", r"dev-disk-by\x2duuid-1.swap"),
        ("/system.slice/docker.socket", "docker.socket"),
        # cgroups that a service makes below its own
        ("/system.slice/nginx.service/worker/1", "nginx.service"),
        ("/system.slice/delegated.service/mariadb.service", "delegated.service"),
        ("/system.slice/postgresql.slice/pg@14-main.service/supervisor", "pg@14-main.service"),
        ("/system.slice/slurmstepd.scope/job_12/step_0/user/task_0", "slurmstepd.scope"),
        # a user's manager
        (f"{USER}/app.slice/mariadb.service", "user-1000.slice/mariadb.service"),
        (f"{USER}/app.slice/app-gnome-firefox-12345.scope", "user-1000.slice/app-gnome-firefox-12345.scope"),
        (f"{USER}/home-me-remote.mount", "user-1000.slice/home-me-remote.mount"),
        (f"{USER}/app.slice/gpg-agent.socket", "user-1000.slice/gpg-agent.socket"),
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
        ("/.mount", ""),
        ("/system.slice/logrotate.timer", ""),
        # docker, containerd, CRI-O, Kubernetes: cgroups made by systemd, and by the runtimes themselves
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
        (f"/libpod_parent/{OTHER_ID}/libpod-{ID}", SHORT),
        (f"/libpod_parent/{OTHER_ID}/conmon", ""),  # of all containers of the pod
        (f"/libpod_parent/{OTHER_ID}", ""),
        (f"/docker/{ID}/libpod_parent/{OTHER_ID}/libpod-{OTHER_ID}", SHORT),
        (f"/system.slice/{ID}-61b0c2a7e9d4f518.service", SHORT),
        (f"/system.slice/shop.service/libpod-payload-{ID}", "shop.service"),
        ("/system.slice/shop.service/runtime", "shop.service"),
        # containers of whole systems
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
    assert unit_of(path).name == unit


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
    assert unit_of_cgroup_file("\n".join(lines).encode()).name == unit


@pytest.mark.parametrize(("path", "unit"), {**CONTAINERS, **MONITORS}.items())
def test_what_a_path_says(path: str, unit: Unit) -> None:
    assert unit_of(path) == unit
    assert unit_of(f"{path} (deleted)") == unit
    assert unit_of_cgroup_file(f"0::{path}\n".encode()) == unit
    every = ("12:memory", "5:cpu,cpuacct", "1:name=systemd", "0:")
    assert unit_of_cgroup_file("".join(f"{each}:{path}\n" for each in every).encode()) == unit


@pytest.mark.parametrize(
    "path", ["/podcast/ID", f"/pod{UID[:-1]}/ID", f"/pod{UID}0/ID", f"/pod{UID.upper()}/ID", "/pod/ID"]
)
def test_what_is_no_uid_of_a_pod(path: str) -> None:
    assert unit_of(path.replace("ID", ID)) == Unit(SHORT, ID)


def test_a_cgroup_that_somebody_calls_as_he_likes() -> None:
    """Names of cgroups that anybody makes become label values: they have one line, and are no longer than the
    name of a file may be."""
    long = "x" * 249 + ".slice"
    assert unit_of(f"/{long}/a.service").slice == long
    for name in ("a\nb.slice", 'a"b.slice', "a\\b.slice", "a{b}.slice", "\u2028.slice"):
        unit = unit_of(printable_path(f"/{name}/a.service".encode()))
        assert unit.name == "a.service"
        assert unit.slice.isprintable()
        assert len(unit.slice) == len(name)
    assert (
        unit_of("/user.slice/user-1000.slice/user@1000.service/system.slice/a.service").slice
        == "user-1000.slice"
    )
    assert unit_of("/system.slice/a.service/machine.slice/b.service") == Unit(
        "a.service", slice="system.slice"
    )


KNOWN_PARTS = [
    *(
        ID,
        f"docker-{ID}.scope",
        f"libpod-payload-{ID}",
        f"crio-conmon-{ID}",
        "docker",
        "lxc",
        "lxc.payload.a",
    ),
    *(f"pod{UID}", f"{POD}.slice", f"a-{POD}.slice:cri-containerd:{ID}", "a.slice", "a.service", "a.mount"),
    *("user@1000.service", "init.scope", "machine-a.scope", "systemd-nspawn@a.service", " (deleted)", ".."),
]
PARTS = st.text(st.characters(exclude_characters="/"), max_size=20) | st.sampled_from(KNOWN_PARTS)


@given(st.lists(PARTS, max_size=8), st.booleans())
@example([], False)
def test_any_path_has_short_labels(parts: list[str], is_deleted: bool) -> None:
    path = "/" + "/".join(parts) + " (deleted)" * is_deleted
    unit = unit_of(path)
    longest = max(map(len, parts), default=0)
    assert len(unit.name) <= 2 * longest + len("user-.slice/")
    assert len(unit.slice) <= longest
    assert unit.pod_uid == "" or len(unit.pod_uid) in (32, 36)
    assert unit.runtime in {"", "lxc", "systemd-nspawn", *RUNTIMES.values()}
    assert unit.container_id == "" or unit.runtime == "lxc" or len(unit.container_id) == 64
    assert len(unit.container_id) <= max(longest, 64)
    assert unit == NO_UNIT or unit.name


@given(st.binary(max_size=500))
def test_any_file_can_be_read(text: bytes) -> None:
    unit = unit_of_cgroup_file(text)
    assert all(field.isprintable() for field in unit)
