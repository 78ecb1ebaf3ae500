"""Root directories of Debian's releases with the packages that a test needs, kept in LOCKD_CACHE.

A root is made anew once a month, to have the updates of the release, and when the list of packages changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest

from tests.machine.cache import NoSource, proxies, sources

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("LOCKD_CACHE", "/var/cache/lockd-tests")) / "roots"
USELESS = ("doc", "locale", "man")
"""The directories of /usr/share that a root is made without."""

ENTER = """
for part in usr etc; do mount -o bind,ro "$1/$part" "/$part"; done
mount -o bind,ro "$2" "$2"
cd "$2"
shift 2
exec "$@"
"""


def inside(root: Path) -> list[str | Path]:
    """Return the words to put before a command so that it runs on the programs and libraries of `root`.

    In a mount namespace of its own, the command sees /usr and /etc of the root in place of this host's.
    Everything else, such as /proc, /sys and /tmp, is this host's. The command's working directory is the
    checkout, read-only.
    """
    return ["unshare", "--mount", "sh", "-ec", ENTER, "-", root, ROOT]


def root_of(suite: str, packages: Sequence[str] = (), place: Path = CACHE) -> Path:
    """Return a root of `suite` with these packages, by default with those that lockd needs.

    `place` keeps one root for each suite. Skips the test where there is no mirror of Debian.
    """
    packages = packages or _packages()
    recipe = hashlib.sha256(repr((packages, USELESS)).encode()).hexdigest()[:16]
    wanted = place / f"{suite}-{recipe}-{date.today():%Y-%m}"
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if wanted.exists():
            return wanted
        with tempfile.TemporaryDirectory(prefix="new-", dir=place) as new:
            try:
                _make(suite, packages, Path(new, "root"))
            except subprocess.CalledProcessError:
                if older := sorted(place.glob(f"{suite}-{recipe}-*")):
                    return older[-1]  # without the network, last month's root will do
                raise
            Path(new, "root").rename(wanted)
        for old in place.glob(f"{suite}-*"):
            if old != wanted:
                shutil.rmtree(old)
    return wanted


def _packages() -> list[str]:
    listed = subprocess.check_output(["make", "-s", "-C", ROOT, "packages"], text=True)
    return [word.partition("|")[0] for word in listed.split()]


def _make(suite: str, packages: Sequence[str], root: Path) -> None:
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in USELESS]
    # A mirror that is no longer updated is outdated, but its signature is still good.
    command += ['--aptopt=Acquire::Check-Valid-Until "false"']
    command += [f"--aptopt={line}" for line in proxies()]
    try:
        source = sources(suite).strip()
    except NoSource as error:
        pytest.skip(str(error))
    subprocess.run([*command, suite, root, source], check=True)
