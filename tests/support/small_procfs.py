"""A small proc file system made of real files."""

from __future__ import annotations

import os
import re
from pathlib import Path

V1_MOUNTS = "30 1 0:25 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


class Procfs:
    """Processes under `root`, as the kernel would show them."""

    def __init__(self, root: Path, mountinfo: str = V1_MOUNTS) -> None:
        self.root = root
        (root / "self").mkdir()
        (root / "self/mountinfo").write_text(mountinfo)

    def add(
        self,
        tgid: int,
        comm: bytes,
        cgroup: bytes = b"0::/\n",
        is_kernel: bool = False,
        start: int = 0,
    ) -> Path:
        """Add a process, or replace the one with this id by another.

        `start` is the time of its start, in clock ticks since the boot.
        """
        directory = self.root / str(tgid)
        directory.mkdir(exist_ok=True)
        (directory / "comm").write_bytes(comm + b"\n")
        (directory / "cgroup").write_bytes(cgroup)
        flags = 0x208040 if is_kernel else 0x400100
        stat = b"%d (%s) S 2 0 0 0 -1 %d 0 0 0 0 0 0 0 0 20 0 1 0 %d 0\n" % (tgid, comm, flags, start)
        (directory / "stat").write_bytes(stat)
        return directory

    def add_thread(self, tgid: int, tid: int, comm: bytes) -> None:
        """Add a thread to a process, in the same cgroups as the process."""
        directory = self.root / str(tgid) / "task" / str(tid)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "comm").write_bytes(comm + b"\n")
        (directory / "cgroup").write_bytes((self.root / str(tgid) / "cgroup").read_bytes())

    def end_leader(self, tgid: int, threads: int = 1) -> None:
        """End the first thread of a process that has so many threads. The process stays in procfs.

        The kernel then shows the process in the root of all hierarchies of cgroup v1.
        """
        directory = self.root / str(tgid)
        before, _, after = (directory / "stat").read_bytes().rpartition(b") ")
        fields = after.split(b" ")
        fields[0], fields[6], fields[17] = b"Z", b"%d" % (int(fields[6]) | 0x4), b"%d" % threads
        (directory / "stat").write_bytes(before + b") " + b" ".join(fields))
        cgroup = (directory / "cgroup").read_bytes()
        (directory / "cgroup").write_bytes(re.sub(rb"(?m)^([1-9]\d*:[^:]*:)/.*$", rb"\1/", cgroup))

    def remove(self, tgid: int) -> None:
        for name in ("comm", "cgroup", "stat"):
            os.unlink(self.root / str(tgid) / name)
