"""The newest packages of a kernel: image, modules and headers, unpacked in the cache."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.machine.cache import CACHE, locked, sources

NEWEST = "newest"
"""In place of a series: the newest one that a suite has. On the day the suite gets another series, tests can
fail because of that kernel, but not because the old name is gone."""
FRESH_SECONDS = 24 * 3600.0
"""The time for which the package that was found newest counts as the newest."""

PARTS = re.compile(r"linux-(image|binary|modules|headers|kbuild)-")
"""The names of packages, among a kernel's dependencies, that are parts of it or serve to build modules."""


@dataclass(frozen=True)
class Unpacked:
    """A kernel in the cache. `release` is what uname -r says."""

    release: str
    root: Path

    @property
    def image(self) -> Path:
        old = self.root / "boot" / f"vmlinuz-{self.release}"
        return old if old.exists() else self.modules / "vmlinuz"  # where it is since 7.1 or so

    @property
    def modules(self) -> Path:
        return self.root / "usr/lib/modules" / self.release

    @property
    def headers(self) -> Path:
        return self.root / "usr/src" / f"linux-headers-{self.release}"


def unpacked(series: str, suite: str) -> Unpacked:
    """Return the newest kernel of that series, downloaded if the cache has not got it.

    Without the network it is the newest one in the cache. Raises subprocess.CalledProcessError.
    """
    place = CACHE / "kernels" / series
    with locked(place / "lock"):
        have = sorted(place.glob("v-*"), key=lambda path: path.stat().st_mtime)
        if have and time.time() - have[-1].stat().st_mtime < FRESH_SECONDS:
            return _found(have[-1])
        with tempfile.TemporaryDirectory(prefix="new-", dir=place) as name:
            new = Path(name)
            try:
                apt = _Apt(new, suite)
            except subprocess.CalledProcessError:
                if have:
                    return _found(have[-1])
                raise
            image, version = apt.newest(series)
            wanted = place / f"v-{version}"
            if not wanted.exists():
                apt.unpack([image, image.replace("linux-image", "linux-headers")], new / "root")
                (new / "root").rename(wanted)
        wanted.touch()
        for old in have:
            if old != wanted:
                shutil.rmtree(old)
        return _found(wanted)


def _found(root: Path) -> Unpacked:
    (modules,) = (root / "usr/lib/modules").iterdir()
    return Unpacked(modules.name, root)


class _Apt:
    """apt for the packages of one suite, whatever the suite of this host. The host itself stays as it is."""

    def __init__(self, directory: Path, suite: str) -> None:
        self._directory = directory
        lines = directory / "sources"
        lines.write_text(sources(suite))
        for part in ("lists/partial", "cache/archives/partial", "debs"):
            (directory / part).mkdir(parents=True)
        self._options = [
            f"-oDir::Etc::SourceList={lines}", "-oDir::Etc::SourceParts=/dev/null",
            f"-oDir::State::Lists={directory}/lists", f"-oDir::Cache={directory}/cache",
            "-oDir::State::Status=/dev/null", "-oAcquire::Languages=none", "-oAcquire::Retries=3",
            "-oAPT::Sandbox::User=root", "-oAPT::Update::Error-Mode=any",
            "-oAcquire::Check-Valid-Until=false",  # an outdated mirror is signed all the same
        ]  # fmt: skip
        self._call("apt-get", "-qq", "update")

    def newest(self, series: str) -> tuple[str, str]:
        """Return name and version of the newest image for all PCs, neither for clouds only nor real-time."""
        release = r"[0-9]+\.[0-9]+" if series == NEWEST else re.escape(series)
        named = rf"^linux-image-{release}\.[^-]*(-[^-]*)?-amd64$"
        found = []
        for line in self._call("apt-cache", "search", "--names-only", named).splitlines():
            name = line.split()[0]
            if "-cloud-" not in name and "-rt-" not in name:
                found.append((self._field(name, "Version"), name))
        if not found:
            raise LookupError(f"the suite has no kernel {series}")
        newest = found[0]
        for one in found[1:]:
            if not subprocess.run(
                ["dpkg", "--compare-versions", one[0], "gt", newest[0]], check=False
            ).returncode:
                newest = one
        return newest[1], newest[0]

    def unpack(self, names: list[str], root: Path) -> None:
        """Unpack these packages and the parts that they depend on into `root`, as one system's files."""
        wanted: list[str] = []
        while names:
            name = names.pop()
            if name not in wanted:
                wanted.append(name)
                for depended in self._field(name, "Depends").split(","):
                    if PARTS.match(depended.strip()):
                        names.append(depended.split()[0])
        self._call("apt-get", "-qq", "download", *wanted, cwd=self._directory / "debs")
        (root / "usr/lib").mkdir(parents=True)
        (root / "lib").symlink_to("usr/lib")  # older releases have modules in /lib
        for package in sorted((self._directory / "debs").iterdir()):
            command = 'dpkg-deb --fsys-tarfile "$1" | tar -x --keep-directory-symlink -C "$2"'
            subprocess.run(["bash", "-o", "pipefail", "-ec", command, "-", package, root], check=True)

    def _field(self, name: str, field: str) -> str:
        shown = self._call("apt-cache", "show", "--no-all-versions", name)
        found = re.search(rf"^{field}: (.*)$", shown, re.MULTILINE)
        return found[1] if found else ""

    def _call(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        return subprocess.check_output([program, *self._options, *arguments], text=True, cwd=cwd)
