"""The surroundings of lockd during a bench: processes in units, repeated actions and cgroup limits."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

KILLED_WITH_US = ("setpriv", "--pdeathsig", "KILL")
READY_SECONDS = 300.0
FIRST_PORT, SHARES, OWN_PORTS = 10_000, 1_000, 20
"""The first port for servers, the number of shares of the ports from there on, and the ports in each share.
All are below those that the kernel chooses by itself (`net.ipv4.ip_local_port_range`)."""
_ports_asked = itertools.count()
"""How many ports this process has tried."""


class Host:
    """The processes that run beside lockd, in units, and the actions that are repeated during a bench."""

    def __init__(self, directory: Path, ends: contextlib.ExitStack) -> None:
        self.directory, self.ends = directory, ends
        self.processes: list[tuple[str, subprocess.Popen[Any]]] = []
        """The processes that must run until the end of the bench, with their units."""
        self.errors: dict[str, list[str]] = defaultdict(list)
        """The errors of repeated actions, by the name of the action."""
        self.over = threading.Event()
        self._threads: list[threading.Thread] = []
        root = cgroup2()
        self._units = root / f"lockdservices{os.getpid()}.slice" if root else None
        if root and self._units:
            own = re.findall("^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)[0]
            self._before = root / own / "cgroup.procs"
            self._units.mkdir()
            self.place("harness", os.getpid())
        ends.callback(self._end)

    @property
    def units(self) -> list[str]:
        """The names of the units, as in labels; none without a cgroup v2 hierarchy."""
        return [cgroup.name for cgroup in self._units.glob("*.service")] if self._units else []

    def _end(self) -> None:
        """Kill the processes that are left in the units, such as children of services; remove the units."""
        self.over.set()
        if self._units:
            self._before.write_text(str(os.getpid()))
        for cgroup in (*self._units.glob("*.service"), self._units) if self._units else ():
            deadline = time.monotonic() + READY_SECONDS
            while time.monotonic() < deadline:
                for pid in map(int, (cgroup / "cgroup.procs").read_text().split()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    cgroup.rmdir()
                    break
                time.sleep(0.05)
        for thread in self._threads:
            thread.join(READY_SECONDS)

    def place(self, unit: str, pid: int) -> None:
        if self._units:
            cgroup = self._units / f"{unit}.service"
            cgroup.mkdir(exist_ok=True)
            with contextlib.suppress(ProcessLookupError):  # it has already ended
                (cgroup / "cgroup.procs").write_text(str(pid))

    def start(
        self, unit: str, *command: object, user: Sequence[str] = (), **how: Any
    ) -> subprocess.Popen[Any]:
        """Start a process that is killed when the thread that starts it ends. Its output goes to UNIT.log."""
        with (self.directory / f"{unit}.log").open("ab") as log:
            words = [*KILLED_WITH_US, *user, *map(str, command)]
            usual = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": self.directory}
            process = subprocess.Popen(words, start_new_session=True, **{**usual, **how})
        self.place(unit, process.pid)
        return process

    def serve(self, unit: str, *command: object, **how: Any) -> subprocess.Popen[Any]:
        """Start a process that must run until the end of the bench."""
        process = self.start(unit, *command, **how)
        self.processes.append((unit, process))
        self.ends.callback(end, process)
        return process

    def run(self, unit: str, *command: object, **how: Any) -> None:
        """Run a process until it ends. An exit code other than 0 is an error."""
        process = self.start(unit, *command, **how)
        if process.wait() and not self.over.is_set():
            raise RuntimeError(f"{command[0]}: exit code {process.returncode}\n{self.log(unit)}")

    def workload(self, comm: str, *command: object) -> subprocess.Popen[Any]:
        """Start a program with the protocol of tests/workloads, and let it begin once it is ready."""
        pipe, environment = subprocess.PIPE, {**os.environ, "LOCKD_COMM": comm}
        process = self.serve(comm, *command, stdin=pipe, stdout=pipe, env=environment)
        assert process.stdin and process.stdout
        if not process.stdout.readline().startswith(b"ready"):
            raise RuntimeError(f"{comm}: not ready\n{self.log(comm)}")
        process.stdin.write(b"\n")
        process.stdin.flush()
        return process

    def every(self, seconds: float, what: str, act: Callable[[], object]) -> None:
        """Call `act` in a thread until the bench ends, with a pause of `seconds` before each call."""

        def go_on() -> None:
            while not self.over.wait(seconds):
                try:
                    act()
                except Exception as error:  # the report has it, and the next call may succeed
                    if not self.over.is_set():
                        self.errors[what].append(f"{type(error).__name__}: {error}")

        self._threads.append(threading.Thread(target=go_on, daemon=True))
        self._threads[-1].start()

    def until(self, what: str, is_ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                if is_ready():
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not ready in {READY_SECONDS:g} s\n{self.log(what)}")
            time.sleep(0.1)

    def make(self, name: str) -> Path:
        directory = self.directory / name
        directory.mkdir()
        return directory

    def log(self, unit: str) -> str:
        return (self.directory / f"{unit}.log").read_text(errors="replace")[-2000:]


def cgroup2() -> Path | None:
    """The mount point of a writable cgroup v2 hierarchy, if there is one."""
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields, _, about = line.partition(" - ")
        if about.split()[0] == "cgroup2" and "rw" in fields.split()[5].split(","):
            return Path(fields.split()[4])
    return None


def end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port for a server that listens on it later, perhaps again and again.

    The kernel does not give it to others that ask for any port. Other processes ask here for other ports: the
    process id tells which share they have.
    """
    own = FIRST_PORT + os.getpid() % SHARES * OWN_PORTS
    for _ in range(OWN_PORTS):
        port = own + next(_ports_asked) % OWN_PORTS
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError(f"the ports from {own} on are all in use")


def get(url: str, seconds: float = 30) -> bytes:
    with urllib.request.urlopen(url, timeout=seconds) as answer:
        body: bytes = answer.read()
    return body


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def hierarchy(controller: str) -> tuple[Path, bool]:
    """The hierarchy for cgroups with a controller, and whether it is cgroup v2."""
    root = cgroup2()
    if root and controller in (root / "cgroup.controllers").read_text().split():
        return root, True
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields, _, about = line.partition(" - ")
        kind, _, options = about.split()[:3]
        if kind == "cgroup" and controller in options.split(","):
            return Path(fields.split()[4]), False
    raise RuntimeError(f"no cgroups with the controller {controller}")


@contextlib.contextmanager
def limited(
    name: str, controller: str, pids: Iterable[int], unified: str, legacy: str, value: object
) -> Iterator[Path]:
    """Move processes into a new cgroup with a limit, and back again at the end of the context.

    The limit is written to the file `unified` with cgroup v2, or `legacy` with v1. The context is the
    cgroup.
    """
    root, is_unified = hierarchy(controller)
    pids = list(pids)
    of_process = Path(f"/proc/{pids[0]}/cgroup").read_text()
    lines = [line.split(":", 2) for line in of_process.splitlines()]
    wanted = "" if is_unified else controller
    before = next(root / path[1:] for _, controllers, path in lines if wanted in controllers.split(","))
    cgroup = (root if is_unified else before) / name
    if is_unified:
        (root / "cgroup.subtree_control").write_text(f"+{controller}")
    cgroup.mkdir()
    try:
        (cgroup / (unified if is_unified else legacy)).write_text(str(value))
        for pid in pids:
            (cgroup / "cgroup.procs").write_text(str(pid))
        yield cgroup
    finally:
        deadline = time.monotonic() + 30
        while True:
            for word in (cgroup / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # the process has ended
                    (before / "cgroup.procs").write_text(word)
            try:
                cgroup.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def remove(cgroup: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            cgroup.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
