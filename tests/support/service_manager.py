"""A systemd that manages services beside whatever runs this host, and lockd's own unit in it.

Elsewhere, this manager (--user) runs the services of a user. It has the code of the system's manager, the
descriptor store included. It needs neither a machine of its own nor a host that was booted with systemd.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from bench.host import free_port
from tests.support.descriptor_store import ROOMY
from tests.support.lockd_process import ROOT, Lockd

UNIT = ROOT / "deploy/systemd/lockd.service"
OF_ITS_OWN = """
mount -t cgroup2 none "$1"
mkdir "$1/$2"
echo $$ >"$1/$2/cgroup.procs"
exec unshare --cgroup sh -ec "$3"
"""
"""The script that runs $3 in a new cgroup, which is the root of all cgroups that it sees: a manager moves the
processes that it finds in its own cgroup."""
START = """
for one in /sys/fs/cgroup /sys/kernel/tracing; do  # none is mounted twice at the same place
    ! mountpoint --quiet $one || umount --lazy $one
done
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /run
mkdir -p /run/systemd/system
mount -t tracefs none /sys/kernel/tracing
exec /lib/systemd/systemd --user --unit=empty.target --log-target=console
"""
"""The script that starts systemd with mounts that it alone sees, and which make it take the host for one that
was booted with systemd."""
CLEAN = """
mount -t cgroup2 none "$1"
while grep -q "populated 1" "$1/$2/cgroup.events"; do  # by a process that has ended, for a moment
    sleep 0.01
done
find "$1/$2" -depth -type d -exec rmdir {} +
"""
APART = ("unshare", "--mount", "--propagation=private", "sh", "-ec")
CONFIG = json.dumps({"budget": {"cpu": None, "requests": None}, **ROOMY})
SECONDS = 60.0


class Service(Lockd):
    """lockd from a copy of the checkout, as its unit runs it, except for the places of its files."""

    def __init__(self, directory: Path) -> None:
        self.library, self._log = directory / "library", directory / "log"
        config, run = directory / "config/systemd/user", directory / "run"
        config.mkdir(parents=True)
        run.mkdir(mode=0o700)
        shutil.copytree(ROOT / "lockd", self.library / "lockd", ignore=shutil.ignore_patterns("__pycache__"))
        self.address = f"127.0.0.1:{free_port()}"  # at each restart too
        self.config = directory / "lockd.yaml"
        self.config.write_text(CONFIG)
        text = UNIT.read_text().replace("/usr/bin/lockd", "/usr/bin/python3 -m lockd")
        lines = text.replace("/etc/lockd/lockd.yaml", str(self.config)).splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("ExecStart="))
        lines[at : at + 1] = [
            f"{lines[at]} --web.listen-address={self.address}",
            f"WorkingDirectory={self.library}",
            f"StandardError=append:{self._log}",
        ]
        (config / "lockd.service").write_text("\n".join(lines) + "\n")
        (config / "empty.target").write_text("[Unit]\nDefaultDependencies=no\n")
        self._environment = os.environ | {
            "XDG_RUNTIME_DIR": str(run),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "XDG_CACHE_HOME": str(directory / "cache"),
        }
        self._groups = (str(directory / "cgroups"), f"lockd-test-{os.getpid()}")
        os.mkdir(self._groups[0])
        self._manager = subprocess.Popen(
            [*APART, OF_ITS_OWN, "sh", *self._groups, START],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._until_it_answers()
        except BaseException:
            self.close()
            raise

    def _until_it_answers(self) -> None:
        deadline = time.monotonic() + SECONDS
        while self._control("list-units").returncode:
            assert self._manager.poll() is None, "systemd does not start"
            assert time.monotonic() < deadline, "systemd does not answer"
            time.sleep(0.1)

    def systemctl(self, what: str, succeeds: bool = True) -> None:
        done = self._control(what, "lockd")
        assert (done.returncode == 0) == succeeds, f"{what}: {done.stderr}\n{self.said()}"

    def show(self, name: str) -> str:
        """Return a property of the service."""
        return self._control("show", "lockd", "-p", name, "--value").stdout.strip()

    @property
    def pid(self) -> int:
        """The process id of the sampler; 0 if there is none."""
        return int(self.show("MainPID"))

    @property
    def systemd_pid(self) -> int:
        """The process id of systemd, which has the descriptors that it keeps."""
        return self._manager.pid

    @property
    def kept(self) -> int:
        """The number of descriptors that systemd keeps."""
        return int(self.show("NFileDescriptorStore"))

    def said(self) -> str:
        """Return what lockd has logged since it was first started."""
        return self._log.read_text() if self._log.exists() else ""

    def until_it_serves(self, after: int) -> None:
        """Wait until a sampler other than the one with the process id `after` has told that it is ready."""
        deadline = time.monotonic() + SECONDS
        while self.show("ActiveState") != "active" or self.pid in (0, after):
            assert time.monotonic() < deadline, f"not active again:\n{self.said()}"
            time.sleep(0.02)

    def close(self) -> None:
        self._control("stop", "lockd")
        self._manager.terminate()
        self._manager.wait(SECONDS)
        subprocess.run([*APART, CLEAN, "sh", *self._groups], check=True, timeout=SECONDS)

    def _control(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["systemctl", "--user", "--no-pager", *arguments]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
