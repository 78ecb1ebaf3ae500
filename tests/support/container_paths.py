"""Paths of cgroups as systemd and each container runtime make them, and the unit that each path tells.

They are facts from the sources named here: the file and function in which each program makes the path. A
runtime's systemd driver asks systemd for PREFIX-ID.scope in a slice; its cgroupfs driver makes a directory.
"""

from __future__ import annotations

from lockd.names.labels.cgroup_paths import Unit

ID = "0123456789abcdef" * 4
OTHER_ID = "fedcba9876543210" * 4
SHORT = ID[:12]
USER = "/user.slice/user-1000.slice/user@1000.service"
UID = "01234567-89ab-cdef-0123-456789abcdef"
HASH = "0123456789abcdef0123456789abcdef"
POD = "pod01234567_89ab_cdef_0123_456789abcdef"
# kubernetes, pkg/kubelet/cm/cgroup_manager_linux.go, ToSystemd() and ToCgroupfs(): a slice has the names of
# those above it, so that dashes within a name are written as `_`.
BURSTABLE = f"kubepods-burstable-{POD}.slice"
BURSTABLE_PATH = f"/kubepods.slice/kubepods-burstable.slice/{BURSTABLE}"
GUARANTEED = f"kubepods-{POD}.slice"
POD_OF_PODMAN = f"machine-libpod_pod_{OTHER_ID}.slice"

CONTAINERS = {
    # systemd, src/basic/unit-name.c and src/core/cgroup.c: a unit below its slices
    "/system.slice/nginx.service": Unit("nginx.service", slice="system.slice"),
    "/a.slice/a-b.slice/nginx.service/worker": Unit("nginx.service", slice="a-b.slice"),
    "/init.scope": Unit("init.scope"),
    "/user.slice/user-1000.slice/session-3.scope": Unit("session-3.scope", slice="user-1000.slice"),
    f"{USER}/init.scope": Unit("user@1000.service", slice="user-1000.slice"),
    f"{USER}/app.slice/shop.service": Unit("user-1000.slice/shop.service", slice="user-1000.slice"),
    # containerd, internal/cri/server/podsandbox/helpers.go, getCgroupsPath()
    f"{BURSTABLE_PATH}/cri-containerd-{ID}.scope": Unit(SHORT, ID, UID, BURSTABLE, "containerd"),
    f"/kubepods.slice/{GUARANTEED}/cri-containerd-{ID}.scope": Unit(SHORT, ID, UID, GUARANTEED, "containerd"),
    f"/kubepods/burstable/pod{UID}/{ID}": Unit(SHORT, ID, UID),
    f"/kubepods/pod{UID}/{ID}": Unit(SHORT, ID, UID),
    # the kubelet's driver is systemd and containerd's is not: what is meant for systemd becomes a directory
    f"/system.slice/containerd.service/{BURSTABLE}:cri-containerd:{ID}": Unit(
        SHORT, ID, UID, "system.slice", "containerd"
    ),
    # kubernetes, pkg/kubelet/config/common.go, applyDefaults(): a static pod
    f"/kubepods.slice/kubepods-pod{HASH}.slice/cri-containerd-{ID}.scope": Unit(
        SHORT, ID, HASH, f"kubepods-pod{HASH}.slice", "containerd"
    ),
    f"/kubepods/burstable/pod{HASH}/{ID}": Unit(SHORT, ID, HASH),
    # the kubelet with --cgroup-root
    f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-{POD}.slice/crio-{ID}.scope": Unit(
        SHORT, ID, UID, f"kubelet-kubepods-{POD}.slice", "cri-o"
    ),
    # nerdctl, pkg/cmd/container/run_cgroup_linux.go, generateCgroupPath(); by default /NAMESPACE/ID
    f"/system.slice/nerdctl-{ID}.scope": Unit(SHORT, ID, "", "system.slice", "containerd"),
    f"/default/{ID}": Unit(SHORT, ID),
    # cri-o, internal/config/cgmgr/systemd_linux.go and cgroupfs_linux.go, ContainerCgroupPath(); crun makes
    # one more cgroup below
    f"{BURSTABLE_PATH}/crio-{ID}.scope/container": Unit(SHORT, ID, UID, BURSTABLE, "cri-o"),
    f"/kubepods/besteffort/pod{UID}/crio-{ID}": Unit(SHORT, ID, UID, "", "cri-o"),
    f"/crio/crio-{ID}": Unit(SHORT, ID, "", "", "cri-o"),
    # moby, daemon/oci_linux.go, WithCgroups(); cri-dockerd gives the pod as parent
    f"/system.slice/docker-{ID}.scope": Unit(SHORT, ID, "", "system.slice", "docker"),
    f"/build.slice/docker-{ID}.scope": Unit(SHORT, ID, "", "build.slice", "docker"),
    f"/docker/{ID}": Unit(SHORT, ID, "", "", "docker"),
    f"/build/{ID}": Unit(SHORT, ID),
    f"/kubepods.slice/{GUARANTEED}/docker-{ID}.scope": Unit(SHORT, ID, UID, GUARANTEED, "docker"),
    f"{USER}/user.slice/docker-{ID}.scope": Unit(
        f"user-1000.slice/{SHORT}", ID, "", "user-1000.slice", "docker"
    ),
    # podman, libpod/container_internal_linux.go, getOCICgroupPath()
    f"/machine.slice/libpod-{ID}.scope/container": Unit(SHORT, ID, "", "machine.slice", "podman"),
    f"/machine.slice/{POD_OF_PODMAN}/libpod-{ID}.scope": Unit(SHORT, ID, "", POD_OF_PODMAN, "podman"),
    f"/libpod_parent/libpod-{ID}": Unit(SHORT, ID, "", "", "podman"),
    # podman, libpod/runtime_pod_linux.go, NewPod()
    f"/libpod_parent/{OTHER_ID}/libpod-{ID}": Unit(SHORT, ID, "", "", "podman"),
    f"/libpod_parent/{OTHER_ID}/libpod-{ID}/container": Unit(SHORT, ID, "", "", "podman"),
    f"/system.slice/shop.service/libpod-payload-{ID}": Unit("shop.service", ID, "", "system.slice", "podman"),
    f"{USER}/user.slice/libpod-{ID}.scope/container": Unit(
        f"user-1000.slice/{SHORT}", ID, "", "user-1000.slice", "podman"
    ),
    f"{USER}/user.slice/user-libpod_pod_{OTHER_ID}.slice/libpod-{ID}.scope": Unit(
        f"user-1000.slice/{SHORT}", ID, "", "user-1000.slice", "podman"
    ),
    f"{USER}/app.slice/shop.service/libpod-payload-{ID}": Unit(
        "user-1000.slice/shop.service", ID, "", "user-1000.slice", "podman"
    ),
    # a user who would pass for a pod
    f"{USER}/user.slice/user-kubepods-{POD}.slice/cri-containerd-{ID}.scope": Unit(
        f"user-1000.slice/{SHORT}", ID, "", "user-1000.slice", "containerd"
    ),
    # lxc, src/lxc/cgroups/cgfsng.c; Proxmox puts them below /lxc
    "/lxc.payload.web/system.slice/nginx.service": Unit("lxc:web", "web", "", "", "lxc"),
    "/lxc/101/ns/init.scope": Unit("lxc:101", "101", "", "", "lxc"),
    # systemd, src/nspawn/nspawn-register.c: with the unit of machinectl, and by hand
    "/machine.slice/systemd-nspawn@web.service/payload/init.scope": Unit(
        "systemd-nspawn@web.service", slice="machine.slice", runtime="systemd-nspawn"
    ),
    r"/machine.slice/machine-qemu\x2d1\x2dvm.scope/libvirt/emulator": Unit(
        r"machine-qemu\x2d1\x2dvm.scope", slice="machine.slice"
    ),
    # kind: the node is a container of Docker or podman, with pods in it
    f"/system.slice/docker-{ID}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-{POD}.slice/"
    f"cri-containerd-{OTHER_ID}.scope": Unit(SHORT, ID, "", "system.slice", "docker"),
    f"/docker/{ID}/kubelet/kubepods/burstable/pod{UID}/{OTHER_ID}": Unit(SHORT, ID, "", "", "docker"),
    # as lockd sees a pod from its own, in a cgroup namespace of its own
    f"/../../{GUARANTEED}/cri-containerd-{ID}.scope": Unit(SHORT, ID, UID, GUARANTEED, "containerd"),
    f"/../../../burstable/pod{UID}/{ID}": Unit(SHORT, ID, UID),
}
"""Units by the path of their cgroup."""
MONITORS = {
    # cri-o, MoveConmonToCgroup(): in the pod's cgroup, or where crio.conf has conmon_cgroup
    f"{BURSTABLE_PATH}/crio-conmon-{ID}.scope": Unit(SHORT, ID, UID, "", "cri-o"),
    f"/system.slice/crio-conmon-{ID}.scope": Unit(SHORT, ID, "", "", "cri-o"),
    f"/kubepods/besteffort/pod{UID}/crio-conmon-{ID}": Unit(SHORT, ID, UID, "", "cri-o"),
    # podman, libpod/oci_conmon_linux.go, moveConmonToCgroupAndSignal(); libpod/healthcheck_linux.go
    f"/machine.slice/libpod-conmon-{ID}.scope": Unit(SHORT, ID, "", "", "podman"),
    f"/system.slice/{ID}-61b0c2a7e9d4f518.service": Unit(SHORT, ID),
    "/system.slice/shop.service/runtime": Unit("shop.service", slice="system.slice"),
}
"""Units by the path of a cgroup that does not have the container, but something that runs beside it."""
