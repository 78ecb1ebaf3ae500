"""A Debian that boots under systemd in QEMU without KVM, with lockd as `make install` puts it there.

What does not depend on the checkout (packages, kernel, initramfs) is kept in LOCKD_CACHE and made anew
when this file's recipe changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("LOCKD_CACHE", "/var/cache/lockd-tests"))
SUITE = "bookworm"
PACKAGES = ("linux-image-amd64", "initramfs-tools", "zstd", "systemd-sysv", "udev", "bpftool")
"""Besides what lockd needs."""
INITRAMFS_MODULES = ("virtio_pci", "virtio_blk", "ext4")
USELESS_DRIVERS = "ata gpu hid iio infiniband input media mtd net scsi staging usb"
USELESS = (
    *(f"/usr/share/{part}/*" for part in ("doc", "locale", "man")),
    *(f"/lib/modules/*/kernel/{part}/*" for part in ("net", "sound")),
    *(f"/lib/modules/*/kernel/drivers/{part}/*" for part in USELESS_DRIVERS.split()),
)
"""Most of what would be in the image otherwise."""

SLOW_UNITS = ("e2scrub_reap.service", "getty-static.service", "getty@tty1.service", "apt-daily.timer")
"""They only compete with lockd for the emulated processors while it starts."""

BOOT_SECONDS = 300.0
SLACK_SECONDS = 60.0
"""An emulated machine is slow: how much longer than asked for an answer may take."""


class VmLost(Exception):
    """The machine gave no answer in time: nothing is said about lockd."""


@dataclass(frozen=True)
class Done:
    """What a command in the guest came to; code -1: it could not be run, or not in time."""

    code: int
    out: str


class Guest:
    """A running machine."""

    def __init__(self, directory: Path, image: Path, kernel: Path, initrd: Path) -> None:
        self._console = directory / "console.log"
        self._rest = b""
        control = directory / "port"
        self._qemu = subprocess.Popen(
            [
                "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off",
                "-smp", "2", "-m", "1500", "-nodefaults", "-display", "none", "-no-reboot",
                "-kernel", kernel, "-initrd", initrd,
                "-append", "root=/dev/vda rw console=ttyS0 mitigations=off panic=-1",
                "-drive", f"file={image},format=raw,if=virtio,cache=unsafe",
                "-device", "virtio-rng-pci", "-serial", f"file:{self._console}",
                "-device", "virtio-serial-pci",
                "-chardev", f"socket,id=port,path={control},server=on,wait=off",
                "-device", "virtserialport,chardev=port,name=lockd-test",
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._port = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + 30
        while self._port.connect_ex(str(control)):
            if self._qemu.poll() is not None or time.monotonic() > deadline:
                raise VmLost("QEMU does not start")
            time.sleep(0.05)
        self._answer("boot", BOOT_SECONDS)

    def run(self, *argv: object, seconds: float = 60) -> Done:
        """Run a program in the guest, `seconds` at most."""
        return self._ask("run", [str(word) for word in argv], seconds)

    def shell(self, text: str, seconds: float = 60) -> str:
        """What a shell command that must succeed prints."""
        done = self.run("sh", "-c", text, seconds=seconds)
        assert done.code == 0, f"{text}: exit code {done.code}: {done.out}"
        return done.out.strip()

    def get(self, url: str, seconds: float = 60) -> Done:
        """What an HTTP server in the guest answers; code -1 if nothing."""
        return self._ask("get", url, seconds)

    def end(self) -> None:
        self._qemu.kill()
        self._qemu.wait()
        self._port.close()

    def _ask(self, do: str, what: Any, seconds: float) -> Done:
        line = json.dumps({"do": do, "what": what, "seconds": seconds}).encode() + b"\n"
        try:
            self._port.sendall(line)
        except OSError as error:
            raise self._lost(f"{what}: cannot be asked: {error}") from None
        return self._answer(what, seconds + SLACK_SECONDS)

    def _answer(self, what: Any, seconds: float) -> Done:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            if not select.select([self._port], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._lost(f"{what}: no answer in {seconds:g} s")
            received = self._port.recv(1 << 20)
            if not received:
                raise self._lost(f"{what}: the machine ended")
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\n")
        return Done(**json.loads(line))

    def _lost(self, why: str) -> VmLost:
        self.end()  # whoever asks next hears at once
        tail = "\n".join(self._console.read_text(errors="replace").splitlines()[-25:])
        return VmLost(f"VM lost: {why}\nits console:\n{tail}")


@contextlib.contextmanager
def booted() -> Iterator[Guest]:
    """A machine that has booted, with lockd enabled."""
    with tempfile.TemporaryDirectory(prefix="lockd-guest-", dir="/var/tmp") as name:
        directory = Path(name)
        image = directory / "image"
        base = _base()
        _build_image(base, directory / "root", image)
        guest = Guest(directory, image, *_kernel(base))
        try:
            yield guest
        finally:
            guest.end()


def _kernel(base: Path) -> tuple[Path, Path]:
    boot = base / "boot"
    return next(boot.glob("vmlinuz-*")), next(boot.glob("initrd.img-*"))


def _lockd_packages() -> list[str]:
    listed = subprocess.check_output(["make", "-s", "-C", ROOT, "packages"], text=True)
    return [word.partition("|")[0] for word in listed.split()]


def _sources() -> str:
    """This host's own mirrors of the suite."""
    shape = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    listed = subprocess.check_output(
        ["apt-get", "indextargets", "--format", shape, "Created-By: Packages"], text=True
    )
    lines = {
        f"deb {line}\n"
        for line in listed.splitlines()
        if line.split()[1] in (SUITE, f"{SUITE}-updates", f"{SUITE}-security")
    }
    if not any(line.split()[2] == SUITE for line in lines):
        pytest.skip(f"host: its package sources have no {SUITE}")
    return "".join(sorted(lines))


def _base() -> Path:
    """The root directory without lockd, made if it is not in the cache."""
    packages = [*PACKAGES, *_lockd_packages()]
    recipe = hashlib.sha256(repr((SUITE, packages, INITRAMFS_MODULES, USELESS)).encode()).hexdigest()[:16]
    base = CACHE / f"{SUITE}-{recipe}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if base.exists():
            return base
        new = Path(tempfile.mkdtemp(prefix="new-", dir=CACHE))
        try:
            _make_base(new / "root", packages)
            (new / "root").rename(base)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        for old in CACHE.glob(f"{SUITE}-*"):
            if old != base:
                shutil.rmtree(old)
    return base


def _make_base(root: Path, packages: list[str]) -> None:
    # A small initramfs: unpacking it is the slowest part of an emulated boot.
    initramfs = (
        'mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/usr/share/initramfs-tools/modules.d" && '
        'echo MODULES=list >"$1/etc/initramfs-tools/conf.d/lockd" && '
        f'printf "%s\\n" {" ".join(INITRAMFS_MODULES)} >"$1/usr/share/initramfs-tools/modules.d/lockd"'
    )
    proxies = subprocess.check_output(["apt-config", "dump"], text=True).splitlines()
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}"]
    command += [f"--dpkgopt=path-exclude={path}" for path in USELESS]
    command += [f"--aptopt={line}" for line in proxies if line.startswith("Acquire::") and "::Proxy " in line]
    command += [f"--essential-hook={initramfs}", SUITE, str(root), "-"]
    subprocess.run(command, input=_sources(), text=True, check=True)


def _build_image(base: Path, root: Path, image: Path) -> None:
    """The base with lockd, the workloads and the agent, as a file system."""
    # Hard links: nothing below writes into a file of the base. Else a copy.
    if subprocess.run(["cp", "-al", base, root], stderr=subprocess.DEVNULL, check=False).returncode:
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["cp", "-a", base, root], check=True)
    install = ["make", "-s", "-C", ROOT, "install", f"DESTDIR={root}"]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    tests = root / "usr/lib/lockd-tests"
    tests.mkdir()
    shutil.copy(Path(__file__).with_name("agent.py"), tests)
    workloads = ROOT / "tests/workloads"
    for name in ("mutex_handover",):  # static, since the guest may have an older libc
        sources = [workloads / f"{name}.c", workloads / "workload.c"]
        subprocess.run(["gcc", "-O2", "-pthread", "-static", "-o", tests / name, *sources], check=True)
    units = root / "etc/systemd/system"
    (units / "lockd-agent.service").write_text(
        "[Unit]\nBindsTo=dev-virtio\\x2dports-lockd\\x2dtest.device\n"
        "After=dev-virtio\\x2dports-lockd\\x2dtest.device\n"
        "[Service]\nExecStart=/usr/bin/python3 /usr/lib/lockd-tests/agent.py\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    # The compiler takes its time when every instruction is emulated.
    (units / "lockd.service.d").mkdir()
    (units / "lockd.service.d/slow.conf").write_text("[Service]\nTimeoutStartSec=300\n")
    # With an id it is not the first boot, whose presets would enable every unit.
    (root / "etc/machine-id").unlink(missing_ok=True)
    (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    systemctl = ["systemctl", f"--root={root}", "--quiet"]
    subprocess.run([*systemctl, "enable", "lockd", "lockd-agent"], check=True)
    subprocess.run([*systemctl, "mask", *SLOW_UNITS], check=True)
    subprocess.run(["mke2fs", "-qF", "-t", "ext4", "-d", root, image, "2G"], check=True)
    shutil.rmtree(root)
