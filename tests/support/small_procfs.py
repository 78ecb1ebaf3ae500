"""A small proc file system made of real files."""

from __future__ import annotations

import os
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
    ) -> Path:
        """Add a process, or replace the one with this id by another."""
        directory = self.root / str(tgid)
        directory.mkdir(exist_ok=True)
        (directory / "comm").write_bytes(comm + b"\n")
        (directory / "cgroup").write_bytes(cgroup)
        flags = 0x208040 if is_kernel else 0x400100
        (directory / "stat").write_bytes(b"%d (%s) S 2 0 0 0 -1 %d 0\n" % (tgid, comm, flags))
        return directory

    def add_thread(self, tgid: int, tid: int, comm: bytes) -> None:
        directory = self.root / str(tgid) / "task" / str(tid)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "comm").write_bytes(comm + b"\n")

    def remove(self, tgid: int) -> None:
        for name in ("comm", "cgroup", "stat"):
            os.unlink(self.root / str(tgid) / name)
