"""The hierarchies of cgroups of this host."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mounted(kind: str, option: str = "") -> Path | None:
    """Return where a hierarchy of this kind is mounted with this option; None if it is not."""
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields, _, about = line.partition(" - ")
        if about.split()[0] == kind and option in about.split()[2].split(","):
            return Path(fields.split()[4])
    return None


@contextmanager
def unified_hierarchy() -> Iterator[Path]:
    """Yield the mount point of the unified hierarchy. It is mounted for the context if it is not yet.

    Skips the test where that is not possible.
    """
    if place := mounted("cgroup2", "rw"):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="lockd-cgroup2-") as directory:
        command = ["mount", "-t", "cgroup2", "none", directory]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"host: no cgroup2 file system can be mounted: {done.stderr.strip()}")
        try:
            yield Path(directory)
        finally:  # lazily: a daemon of another test may have opened it
            subprocess.run(["umount", "--lazy", directory], check=True)
