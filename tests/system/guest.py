"""A machine that boots under systemd, with lockd as `make install` puts it there, and enabled."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.machine import initrd
from tests.machine.base import ROOT, base, make_image
from tests.machine.kernel import unpacked
from tests.machine.qemu import Kernel, Machine
from tests.machine.qemu import booted as machine_booted

KERNEL = ("6.1", "bookworm-security")
"""Series and suite of the kernel: it is the release's own."""
SLOW_UNITS = ("e2scrub_reap.service", "getty-static.service", "getty@tty1.service", "apt-daily.timer")
"""Units that would only compete with lockd for the emulated processors while it starts."""
ACTS = ("unit/process/acts.py", "unit/process/test_confinement.py", "kernel/refusing.py")
"""Tests that are run in the machine, on lockd as it is installed."""
AGENT_UNIT = r"""[Unit]
BindsTo=dev-virtio\x2dports-lockd\x2dtest.device
After=dev-virtio\x2dports-lockd\x2dtest.device
[Service]
ExecStart=/usr/bin/python3 /usr/lib/lockd-tests/agent.py
[Install]
WantedBy=multi-user.target
"""


@contextlib.contextmanager
def booted() -> Iterator[Machine]:
    """Yield a machine that has booted."""
    kernel = unpacked(*KERNEL)
    with tempfile.TemporaryDirectory(prefix="lockd-guest-", dir="/var/tmp") as name:
        image, first = Path(name, "image"), Path(name, "initrd")
        build_image(Path(name, "root"), image)
        initrd.build(kernel.modules, first)
        with machine_booted(Kernel(kernel.image, first, init="/sbin/init"), [image]) as machine:
            yield machine


def build_image(root: Path, image: Path) -> None:
    """Write the userland of all machines, with lockd, a workload and the agent, as a file system."""
    # Hard links do, since nothing below writes into a file of the base. Where they cannot be made, copy.
    userland = base() / "root"
    if subprocess.run(["cp", "-al", userland, root], stderr=subprocess.DEVNULL, check=False).returncode:
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["cp", "-a", userland, root], check=True)
    install = ["make", "-s", "-C", ROOT, "install", f"DESTDIR={root}"]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    tests = root / "usr/lib/lockd-tests"
    shutil.copy(ROOT / "tests/machine/agent.py", tests)
    shutil.copy(ROOT / "pyproject.toml", tests)
    for name in ("conftest.py", "tries.py", "needs.py", *ACTS):
        (tests / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, tests / "tests" / name)
    (tests / "lockd").symlink_to("/usr/lib/lockd/lockd")
    workloads = ROOT / "tests/workloads"
    for name in ("mutex_handover",):  # static, since the machine may have an older libc
        sources = [workloads / f"{name}.c", workloads / "workload.c"]
        subprocess.run(["gcc", "-O2", "-pthread", "-static", "-o", tests / name, *sources], check=True)
    units = root / "etc/systemd/system"
    (units / "lockd-agent.service").write_text(AGENT_UNIT)
    # Compiling takes long when every instruction is emulated.
    (units / "lockd.service.d").mkdir()
    (units / "lockd.service.d/slow.conf").write_text("[Service]\nTimeoutStartSec=300\n")
    # With a machine id, this is not the first boot, at which presets would enable every unit.
    (root / "etc/machine-id").unlink(missing_ok=True)
    (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    systemctl = ["systemctl", f"--root={root}", "--quiet"]
    subprocess.run([*systemctl, "enable", "lockd", "lockd-agent"], check=True)
    subprocess.run([*systemctl, "mask", *SLOW_UNITS], check=True)
    make_image(root, image, "2G")
    shutil.rmtree(root)
