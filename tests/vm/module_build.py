"""The kernel test module, built for a kernel from its headers packages."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.debian import root_of
from tests.machine.cache import CACHE, locked
from tests.machine.kernel import Unpacked

SOURCES = Path(__file__).with_name("module")
NAME = "lockd_test.ko"
TOOLS = ("gcc", "make", "libelf1")
"""The packages that building a module takes, besides the kernel's headers packages."""

BUILD = """
mount -t overlay -o "ro,lowerdir=$1/usr:$2/usr" kernel "$2/usr"
mount --bind "$3" "$2/mnt"
mount --bind /proc "$2/proc"
exec chroot "$2" make -s -C "/usr/src/linux-headers-$4" M=/mnt CC=gcc CONFIG_DEBUG_INFO_BTF_MODULES= modules
"""
"""The script that builds the module, in a mount namespace of its own: the kernel's /usr is laid over that of
the release with the tools."""


def build_module(kernel: Unpacked, suite: str) -> Path:
    """Return lockd_test.ko for a kernel of `suite`. It is in the cache until sources or kernel change.

    The release's own gcc, make and libraries build it: the programs among a kernel's headers run on no older
    C library, and another compiler may know other options. Skips the test where there is no mirror of Debian.
    Raises RuntimeError with the compiler's words.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in _sources():
        digest.update(source.read_bytes())
    wanted = CACHE / "module" / f"{kernel.release}-{digest.hexdigest()[:16]}" / NAME
    with locked(CACHE / "module" / "lock"):
        if not wanted.exists():
            _build(kernel, root_of(suite.removesuffix("-security"), TOOLS, CACHE / "tools"), wanted)
            for old in wanted.parent.parent.glob(f"{kernel.release}-*"):
                if old != wanted.parent:
                    shutil.rmtree(old)
    return wanted


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h") or path.name == "Kbuild")


def _build(kernel: Unpacked, tools: Path, wanted: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="new-", dir=CACHE) as name:
        place = Path(name)
        for source in _sources():
            shutil.copy(source, place)
        command = ["unshare", "--mount", "sh", "-ec", BUILD, "-", kernel.root, tools, place, kernel.release]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode or not (place / NAME).exists():
            raise RuntimeError(f"{SOURCES}: not built for {kernel.release}:\n{done.stdout}")
        wanted.parent.mkdir(exist_ok=True)
        (place / NAME).rename(wanted)
