"""Units by the path of a cgroup: the service or container, by the name that an operator uses, and its ids."""

from __future__ import annotations

import re
from typing import NamedTuple

from lockd.printable import masked

SERVICE = re.compile(r"/([^/]+\.(?:service|scope|mount|swap|socket))(?=/|$)")
"""A unit of systemd that has processes.

Of a mount unit these are mount(8) and the daemon of a file system in user space; of a socket or swap unit,
the programs that systemd runs to set it up.
"""
CONTAINER = re.compile(
    r"""/(?:
        (?!libpod-payload-)(?!(?<=/libpod_parent/)[0-9a-f]{64}(?:/|$))
            (?P<prefix>[^/]*[-:])?(?P<id>[0-9a-f]{64})
            (?:\.scope|(?P<check>-[0-9a-f]+\.service))?
        | lxc(?:\.payload\.|\.monitor\.|/)(?P<lxc>[^/]+)
        | (?P<machine>machine-[^/]+\.scope | systemd-nspawn@[^/]+\.service)
    )(?=/|$)""",
    re.VERBOSE,
)
"""A container in the path of a cgroup.

The path has the id alone (cgroupfs drivers), or docker-ID.scope, cri-containerd-ID.scope,
crio-conmon-ID.scope, kubepods-podUID.slice:cri-containerd:ID, or ID-HEX.service for podman's health checks.
libpod-payload-ID is not matched: this container is the only one of a service that was written for it, and the
name of the service stays the same when the container gets a new id. The id of one of podman's pods, alone and
below /libpod_parent, is not matched either: the pod's containers are below it.
"""
RUNTIMES = {
    "docker": "docker",  # moby, daemon/oci_linux.go: WithCgroups()
    "cri-containerd": "containerd",  # containerd, internal/cri: getCgroupsPath()
    "nerdctl": "containerd",  # nerdctl, pkg/cmd/container/run_cgroup_linux.go: generateCgroupPath()
    "crio": "cri-o",  # cri-o, internal/config/cgmgr: CrioPrefix
    "libpod": "podman",  # podman, libpod/container_internal_linux.go: getOCICgroupPath()
}
"""Runtimes as Kubernetes calls them in `RUNTIME://ID`, by the prefix that they put before an id.

With the cgroupfs driver containerd and Docker use no prefix. Below `/docker/`, Docker's default parent,
_container_of() takes an id without prefix for Docker's.
"""
MONITOR = "-conmon"
"""The end of a prefix that means the runtime's monitor of a container, not the container."""
PAYLOAD = re.compile(r"/libpod-payload-([0-9a-f]{64})(?=/|$)")
"""The cgroup of a container in a service that was written for it (podman's `--cgroups=split`, Quadlet)."""
SHORT_ID = 12
"""Characters of a container's id that are shown."""
POD = re.compile(r"[/-]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=\.slice|/)")
"""The cgroup of a Kubernetes pod: podUID, or …-podUID.slice with `_` for `-`, as systemd nests slices by `-`.

The uid of a static pod is the hash of its file, without dashes. (Kubernetes: pkg/kubelet/cm,
escapeSystemdCgroupName(); pkg/kubelet/config, applyDefaults().)
"""
SLICE = re.compile(r"/([^/]+\.slice)(?=/)")
"""A slice in the path of a cgroup, but not at its end."""
USER_MANAGER = re.compile(r"user@(?P<user>[^/]+)\.service")
"""The unit of a user's own service manager."""
DELETED = " (deleted)"
"""The end of the path of a removed cgroup."""


class Unit(NamedTuple):
    """A unit, and what the path of its cgroup says of it: each field is empty if the path does not say it."""

    name: str = ""
    """The name of the unit of systemd; for a container its short id, `lxc:NAME`, or the name of its scope or
    service (systemd-nspawn)."""
    container_id: str = ""
    """The whole id of the container; the name of an LXC container."""
    pod_uid: str = ""
    """The uid of the Kubernetes pod, as the API server writes it."""
    slice: str = ""
    """The innermost slice of the system's manager that the unit is in."""
    runtime: str = ""
    """The runtime of the container: a value of RUNTIMES, `lxc` or `systemd-nspawn`."""

    @property
    def said(self) -> int:
        """How many of the fields are known."""
        return sum(map(bool, self))


NO_UNIT = Unit()


def unit_of(path: str) -> Unit:
    """The unit in the path of a cgroup; NO_UNIT if there is none.

    The unit is the outermost container: somebody else chose the names inside, and a whole system may run
    there. Without a container, the unit is the outermost service, scope, mount, swap or socket of systemd, as
    a service may arrange the cgroups below its own. The units of a user's manager have names of the user's
    choice: the user's slice is put before them.

    >>> unit_of("/system.slice/nginx.service/worker").name
    'nginx.service'
    >>> unit_of("/user.slice/user-1000.slice/user@1000.service/app.slice/nginx.service").name
    'user-1000.slice/nginx.service'
    """
    return _container_of(path) or _service_of(path) or NO_UNIT


def unit_of_cgroup_file(text: bytes) -> Unit:
    """The unit in the content of /proc/PID/cgroup; NO_UNIT if there is none.

    A container in any hierarchy comes first, then a service in systemd's own hierarchy, then one in any
    other.
    """
    hierarchies = [printable_path(line).split(":", 2) for line in text.split(b"\n")]
    known = sorted((h for h in hierarchies if len(h) == 3), key=lambda h: h[1] not in ("name=systemd", ""))
    paths = [path for _, _, path in known]
    units = (unit for find in (_container_of, _service_of) for path in paths if (unit := find(path)))
    return next(units, NO_UNIT)


def printable_path(path: bytes) -> str:
    """A path as printable text: whoever may create cgroups may give them any names."""
    return masked(path.decode("utf-8", "backslashreplace"))


def _container_of(path: str) -> Unit | None:
    """The outermost container in the path of a cgroup; None if there is none."""
    match = CONTAINER.search(path.removesuffix(DELETED))
    if not match:
        return None
    above = path[: match.start() + 1]
    owner, slice_ = _slice_of_user(above), _slice_of(above)
    if lxc := match["lxc"]:
        return Unit(f"{owner}lxc:{lxc}", lxc, slice=slice_, runtime="lxc")
    if machine := match["machine"]:
        # The scope of a virtual machine has a name of this form, too.
        runtime = "systemd-nspawn" if machine.startswith("systemd-nspawn@") else ""
        return Unit(owner + machine, slice=slice_, runtime=runtime)
    prefix = (match["prefix"] or "")[:-1].rpartition(":")[2]
    if not prefix and above.endswith("/docker/"):  # the parent that Docker chooses with cgroupfs
        prefix = "docker"
    # The monitor and the health check of a container may be in another slice than the container.
    is_beside = prefix.endswith(MONITOR) or match["check"]
    # A user's manager may make cgroups of any name: none of them may pass for a part of somebody's pod.
    pods: list[str] = [] if owner else POD.findall(path[: match.start("id")])
    return Unit(
        owner + match["id"][:SHORT_ID],
        match["id"],
        pods[-1].replace("_", "-") if pods else "",
        "" if is_beside else slice_,
        RUNTIMES.get(prefix.removesuffix(MONITOR), ""),
    )


def _service_of(path: str) -> Unit | None:
    """The outermost match of SERVICE in the path of a cgroup, for a user's manager the one that it runs; None
    if there is none."""
    path = path.removesuffix(DELETED)
    units = list(SERVICE.finditer(path))
    if not units:
        return None
    # init.scope is the user's manager itself.
    is_users = units[1:] and USER_MANAGER.fullmatch(units[0][1]) and units[1][1] != "init.scope"
    unit = units[1] if is_users else units[0]
    name = _slice_of_user(path) + unit[1] if is_users else unit[1]
    payload = PAYLOAD.match(path, unit.end())
    return Unit(
        name,
        payload[1] if payload else "",
        slice=_slice_of(path),
        runtime=RUNTIMES["libpod"] if payload else "",
    )


def _slice_of(path: str) -> str:
    """The innermost slice above the first match of SERVICE: names below that are not the system's."""
    first = SERVICE.search(path)
    slices: list[str] = SLICE.findall(path[: first.start() + 1] if first else path)
    return slices[-1] if slices else ""


def _slice_of_user(path: str) -> str:
    """The slice of the user whose manager has this cgroup, and a `/`; empty without such a manager."""
    first = SERVICE.search(path)
    manager = USER_MANAGER.fullmatch(first[1]) if first else None
    return f"user-{manager['user']}.slice/" if manager else ""
