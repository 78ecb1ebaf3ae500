"""Machines that run the tested kernels, with this checkout at /work."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.machine import initrd, qemu
from tests.machine.base import ROOT, base, make_image
from tests.machine.kernel import unpacked
from tests.vm.kernels import Kernel
from tests.vm.module_build import build_module

PARTS = ("lockd", "tests", "config", "pyproject.toml")
"""What tests/kernel needs of a checkout, listed by name, since there may be no .git to tell."""
NOT_PARTS = shutil.ignore_patterns("__pycache__", ".*")
ORIGINALS = ("stackcount", "offcputime", "offwaketime")
"""Tools of bcc that tests compare lockd's with: scripts of the package bpfcc-tools."""
KLOCKSTAT = Path("/usr/sbin/klockstat-bpfcc")
"""The tool of bcc that is run in the machines, as their Python has bcc."""
WORK = "/work"


def prepare(kernels: Sequence[Kernel]) -> None:
    """Put into the cache what takes the network or a compiler: userland, kernels, and the test module."""
    base()
    modules = ROOT / "tests/vm/module/build"
    modules.mkdir(exist_ok=True)
    for kernel in kernels:
        found = unpacked(kernel.series, kernel.suite)
        shutil.copy(build_module(found, kernel.suite), modules / f"{found.release}.ko")
    shutil.copy(KLOCKSTAT, modules / "klockstat.py")


@contextlib.contextmanager
def checkout() -> Iterator[Path]:
    """Yield a disk with the checkout as it is now, and the built programs that its tests run."""
    with tempfile.TemporaryDirectory(prefix="lockd-checkout-", dir="/var/tmp") as name:
        root, disk = Path(name) / "root", Path(name) / "disk"
        make_checkout(root)
        make_image(root, disk, "256M")
        yield disk


def make_checkout(root: Path) -> None:
    subprocess.run(["make", "-s", "-C", ROOT / "tests/workloads"], check=True)
    subprocess.run(["make", "-s", "-C", ROOT / "tests/programs", "build/holders_c"], check=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, root / part, ignore=NOT_PARTS)
        else:
            shutil.copy2(ROOT / part, root / part)
    (root / "originals").mkdir()
    for name in ORIGINALS:
        shutil.copy2(f"/usr/sbin/{name}-bpfcc", root / "originals" / name)
    if _newer_libc():
        workloads = root / "tests/workloads"
        subprocess.run(["make", "-s", "-C", workloads, "clean"], check=True)
        subprocess.run(["make", "-s", "-C", workloads, "LDFLAGS=-static"], check=True)
        static = ["make", "-s", "-B", "LDFLAGS=-static", "build/holders_c"]
        subprocess.run([*static, "-C", root / "tests/programs"], check=True)
    # Compiling Python is slow in a machine. The compiled files are of use if the host has the same Python.
    subprocess.run(["/usr/bin/python3", "-m", "compileall", "-q", root], check=True)


def _newer_libc() -> bool:
    """Whether the host has a newer C library than a machine, in which its programs may then not run."""
    here = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()[-1]
    query = ["dpkg-query", f"--admindir={base() / 'root/var/lib/dpkg'}", "-W", "-f=${Version}", "libc6"]
    there = subprocess.check_output(query, text=True).partition("-")[0]
    return [int(part) for part in here.split(".")] > [int(part) for part in there.split(".")]


@contextlib.contextmanager
def booted(tested: Kernel, disk: Path, sleep: str = "off") -> Iterator[qemu.Machine]:
    """Yield a machine that has booted this kernel. `disk` is from checkout(); qemu.CLOCK explains `sleep`.

    The machine has read its disks once, so that what a test starts is in its memory.
    """
    found = unpacked(tested.series, tested.suite)
    with tempfile.NamedTemporaryFile(prefix="lockd-initrd-", dir="/var/tmp") as file:
        first = Path(file.name)
        initrd.build(found.modules, first)
        disks = [base() / "image", disk]
        with qemu.booted(qemu.Kernel(found.image, first), disks, memory="2G", sleep=sleep) as machine:
            with _without_hung_tasks(machine):
                machine.shell(
                    f"find /bin /sbin /lib /usr {WORK} -xdev -type f -exec cat {{}} + >/dev/null", 300
                )
            yield machine


@contextlib.contextmanager
def _without_hung_tasks(machine: qemu.Machine) -> Iterator[None]:
    """Keep the kernel from complaining of tasks that wait for a disk.

    While they do, the machine is idle and its clock leaps: a moment of the host is minutes in the machine.
    """
    limit = "/proc/sys/kernel/hung_task_timeout_secs"
    usual = machine.shell(f"if [ -e {limit} ]; then cat {limit}; echo 0 >{limit}; fi").strip()
    yield
    if usual:
        machine.shell(f"echo {usual} >{limit}")
