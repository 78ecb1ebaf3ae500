"""The userland of all machines: a Debian with what lockd and its tests need, without a kernel."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.machine.cache import CACHE, locked, proxies, sources

ROOT = Path(__file__).resolve().parents[2]
SUITE = "bookworm"
PACKAGES = (
    "systemd-sysv", "udev", "bpftool", "kmod", "make",
    "python3-pytest", "python3-pytest-timeout", "python3-hypothesis",
)  # fmt: skip
"""The packages besides those that lockd needs."""
USELESS = tuple(f"/usr/share/{part}/*" for part in ("doc", "locale", "man"))
IMAGE_SIZE = "3G"


def base() -> Path:
    """Return a directory with the userland as a file tree `root` and as a file system `image`.

    Nobody may write there.
    """
    listed = subprocess.check_output(["make", "-s", "-C", ROOT, "packages"], text=True)
    packages = [*PACKAGES, *(word.partition("|")[0] for word in listed.split())]
    recipe = hashlib.sha256(repr((SUITE, packages, USELESS, IMAGE_SIZE)).encode()).hexdigest()[:16]
    wanted = CACHE / "base" / recipe
    with locked(CACHE / "base.lock"):
        if wanted.exists():
            return wanted
        wanted.parent.mkdir(exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix="new-", dir=CACHE))
        try:
            _make_root(new / "root", packages)
            make_image(new / "root", new / "image", IMAGE_SIZE)
            new.chmod(0o755)
            new.rename(wanted)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        for old in wanted.parent.iterdir():
            if old != wanted:
                shutil.rmtree(old)
    return wanted


def make_image(root: Path, image: Path, size: str) -> None:
    """Write the files under `root` to `image`, as an ext4 file system of that size."""
    # Checksums and a journal would only cost time: what a machine writes into the image is kept by nobody.
    features = "^metadata_csum,^has_journal"
    subprocess.run(
        ["mke2fs", "-qF", "-t", "ext4", "-O", features, "-d", root, image, size],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _make_root(root: Path, packages: list[str]) -> None:
    # Directories that all machines expect in the root.
    places = 'mkdir -p "$1/work" "$1/usr/lib/lockd-tests"'
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}"]
    command += [f"--dpkgopt=path-exclude={path}" for path in USELESS]
    command += [f"--aptopt={line}" for line in proxies()]
    command += [f"--customize-hook={places}", SUITE, str(root), "-"]
    lines = "".join(sources(suite) for suite in (SUITE, f"{SUITE}-updates", f"{SUITE}-security"))
    subprocess.run(command, input=lines, text=True, check=True)
