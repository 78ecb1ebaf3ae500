"""The cache that keeps the parts of machines between runs, and the package sources they come from."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE = Path(os.environ.get("LOCKD_CACHE", "/var/cache/lockd-tests"))


class NoSource(Exception):
    """APT's sources on this host list no mirror for what is asked for."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path` for the context, to be alone with what it stands for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sources(suite: str) -> str:
    """Return a line of sources.list for `suite`, with the mirror that this host uses. Raises NoSource."""
    shape = "$(REPO_URI) $(ORIGIN) $(RELEASE)"
    listed = subprocess.check_output(
        ["apt-get", "indextargets", "--format", shape, "Created-By: Packages"], text=True
    )
    for line in sorted(listed.splitlines()):
        mirror, origin, release = line.split(" ")
        # Security updates have a mirror of their own.
        if origin == "Debian" and release.endswith("-security") == suite.endswith("-security"):
            return f"deb {mirror} {suite} main\n"
    raise NoSource(f"host: APT's sources list no Debian mirror from which to take {suite}")


def proxies() -> list[str]:
    """Return the proxies through which apt reaches the network here, as options of apt."""
    dump = subprocess.check_output(["apt-config", "dump"], text=True).splitlines()
    return [line for line in dump if line.startswith("Acquire::") and "::Proxy " in line]
