"""A machine that QEMU emulates, without KVM, and the exchange with the agent in it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOOT_SECONDS = 300.0
CONSOLE_LINES = 120
OOPS = re.compile(r"\bBUG: |\bOops\b|general protection fault|Kernel panic|invalid opcode")
PRINT_SECONDS = 3.0
"""The time that the kernel gets to print some stacks on its console."""
NUDGE_SECONDS = 5.0
"""The length of a silence of the machine after which QEMU is nudged."""
SLACK_SECONDS = 60.0
"""How much longer than asked for an answer may take, since an emulated machine is slow."""


PROCESSORS = (
    # One thread emulates all processors: with one each, QEMU races with a kernel that patches its own code,
    # as for a kprobe, and the kernel dies of an instruction that was never there.
    # cmpxchg16b, with which kernels allocate memory, is off: once in some ten minutes a kernel died right
    # after it, of flags that QEMU 7.2 had wrong.
    # erms is off: with it, kernels copy and clear memory by single bytes, each of which is an instruction.
    "-smp", "2", "-cpu", "max,la57=off,cx16=off,erms=off", "-accel", "tcg,thread=single",
)  # fmt: skip

CLOCK = "shift=0,sleep={}"
"""The clock of a machine. A nanosecond passes with each instruction, however slow this host is at the moment:
the times that a test compares do not depend on who else uses the host.

While all processors of the machine wait, its time passes as the host's does (`sleep` is `on`), or leaps to
what they wait for (`off`). With `on`, QEMU is late on a busy host, and times in the machine are off by some
milliseconds. With `off`, what comes from outside, as from a disk, takes long by the clock of the machine."""

ONE_PROCESSOR = "maxcpus=1"
"""The machine has one processor until it has booted: with counted instructions, kernels before 6.5 would wait
for another one for ever."""
QUICK = "mitigations=off tsc=reliable rcupdate.rcu_expedited=1"
"""Options by which a kernel detaches a hundred probes in one second, not six."""


class VmLost(Exception):
    """The machine gave no answer in time, which says nothing about lockd."""


class KernelPanic(Exception):
    """The machine's kernel died, whoever is to blame."""


@dataclass(frozen=True)
class Done:
    """The result of a command in the machine. Code -1: it could not be run."""

    code: int
    out: str


@dataclass(frozen=True)
class Kernel:
    """The kernel of a machine. `init` is its option init=; by default, the init program is init.c."""

    image: Path
    initrd: Path
    init: str = ""


class Machine:
    """A running machine.

    The first of `disks` is its root; the second, if any, is mounted at /work. Nothing is written into them.
    CLOCK explains `sleep`.
    """

    def __init__(
        self, directory: Path, kernel: Kernel, disks: list[Path], memory: str = "1500", sleep: str = "on"
    ) -> None:
        self._console = directory / "console.log"
        self._rest = b""
        self._began = time.monotonic()
        control, monitor = directory / "port", directory / "monitor"
        append = f"rw {ONE_PROCESSOR} {QUICK} console=ttyS0 quiet clocksource=tsc panic=-1"
        self._qemu = subprocess.Popen(
            [
                "setpriv", "--pdeathsig", "KILL",  # QEMU must not outlive the test run
                "qemu-system-x86_64", *PROCESSORS, "-icount", CLOCK.format(sleep), "-m", memory,
                "-nodefaults", "-display", "none", "-no-reboot",
                "-kernel", kernel.image, "-initrd", kernel.initrd,
                "-append", f"{append} init={kernel.init}" if kernel.init else append,
                *(
                    word
                    for disk in disks
                    for word in ("-drive", f"file={disk},format=raw,if=virtio,snapshot=on,cache=unsafe")
                ),
                "-device", "virtio-rng-pci", "-serial", f"file:{self._console}",
                "-device", "virtio-serial-pci",
                "-chardev", f"socket,id=port,path={control},server=on,wait=off",
                "-device", "virtserialport,chardev=port,name=lockd-test",
                "-monitor", f"unix:{monitor},server=on,wait=off",
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._port, self._monitor = self._connect(control), self._connect(monitor)
        self._answer("boot", BOOT_SECONDS, _ignore)
        self.shell("echo 1 >/sys/devices/system/cpu/cpu1/online; echo 1 >/proc/sys/kernel/sysrq")

    @property
    def seconds(self) -> float:
        """The seconds since the machine's start, less those in which QEMU waited for a processor of the host.

        All time limits count these seconds: a busy host is no fault of the machine.
        """
        waited = [0]
        for file in Path(f"/proc/{self._qemu.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                waited.append(int(file.read_text().split()[1]))
        return time.monotonic() - self._began - max(waited) / 1e9

    def run(
        self,
        *argv: object,
        seconds: float = 60,
        cwd: str = "",
        env: dict[str, str] | None = None,
        more: Callable[[str], None] | None = None,
        silence: float | None = None,
    ) -> Done:
        """Run a program in the machine; `more` is given its output as it comes.

        If it takes longer than `seconds` or is silent for `silence` (as the property `seconds` counts them),
        the machine counts as lost.
        """
        request = {"argv": [str(word) for word in argv], "cwd": cwd, "env": env or {}}
        return self._ask(more or _ignore, seconds, silence, do="run", **request)

    def shell(self, text: str, seconds: float = 60) -> str:
        """Run a shell command that must succeed, and return what it prints."""
        done = self.run("sh", "-c", text, seconds=seconds)
        assert done.code == 0, f"{text}: exit code {done.code}: {done.out}"
        return done.out.strip()

    def get(self, url: str, seconds: float = 60) -> Done:
        """Return the answer of an HTTP server in the machine; code -1 if there is none."""
        return self._ask(_ignore, seconds, None, do="get", url=url, seconds=seconds)

    def put(self, path: str, content: bytes, mode: int = 0o600) -> None:
        """Write a file in the machine."""
        text = base64.b64encode(content).decode()
        done = self._ask(_ignore, 0, None, do="put", path=path, content=text, mode=mode)
        assert done.code == 0, done.out

    def console(self) -> str:
        return self._console.read_text(errors="replace")

    def end(self) -> None:
        self._qemu.kill()
        self._qemu.wait()
        self._port.close()
        self._monitor.close()

    def _ask(self, more: Callable[[str], None], limit: float, silence: float | None, **request: Any) -> Done:
        what = str(request.get("argv") or request.get("url") or request.get("path"))[:200]
        try:
            self._port.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._lost(f"{what}: cannot be asked: {error}") from None
        return self._answer(what, limit + SLACK_SECONDS, more, silence)

    def _answer(
        self, what: str, seconds: float, more: Callable[[str], None], silence: float | None = None
    ) -> Done:
        deadline = self.seconds + seconds
        out: list[str] = []
        while True:
            left = deadline - self.seconds
            answer = json.loads(self._line(what, left if silence is None else min(left, silence)))
            if "code" in answer:
                return Done(answer["code"], "".join(out) + answer["out"])
            out.append(answer["more"])
            more(answer["more"])

    def _connect(self, path: Path) -> socket.socket:
        connected, deadline = socket.socket(socket.AF_UNIX), self.seconds + 30
        while connected.connect_ex(str(path)):
            if self._qemu.poll() is not None or self.seconds > deadline:
                raise VmLost("QEMU does not start")
            time.sleep(0.05)
        return connected

    def _line(self, what: str, seconds: float) -> bytes:
        deadline = self.seconds + seconds
        while b"\n" not in self._rest:
            left = deadline - self.seconds
            if left <= 0:
                raise self._lost(f"{what}: no word in {seconds:.0f} s")
            if not select.select([self._port], [], [], min(left, NUDGE_SECONDS))[0]:
                self._nudge()
                continue
            received = self._port.recv(1 << 20)
            if not received:
                raise self._lost(f"{what}: the machine ended")
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _nudge(self) -> None:
        """Have QEMU's main loop go round once, by a line to its monitor.

        With counted instructions, QEMU sometimes misses that all processors wait. Then it may wait for ever
        for a timer of theirs. Any input to its main loop wakes them.
        """
        with contextlib.suppress(OSError):  # QEMU has ended: the port will say so
            self._monitor.sendall(b"\n")
            self._monitor.recv(1 << 16, socket.MSG_DONTWAIT)

    def _lost(self, why: str) -> Exception:
        at_work = self._busy_share()
        self._print_blocked_tasks()
        self.end()  # the next request fails at once
        console = self.console().splitlines()
        died = next((i for i, line in enumerate(console) if OOPS.search(line)), None)
        if died is not None:
            return KernelPanic("\n".join(["the kernel died:", *console[died : died + CONSOLE_LINES]]))
        words = [f"VM lost: {why}", f"QEMU used {at_work:.0%} of a processor", "its console:"]
        return VmLost("\n".join(words + console[-CONSOLE_LINES:]))

    def _print_blocked_tasks(self) -> None:
        """Have the kernel print the stacks of its blocked tasks and of its processors on the console."""
        with contextlib.suppress(OSError):
            for key in ("9", "w", "l"):  # 9: print all there is
                self._monitor.sendall(f"sendkey alt-sysrq-{key}\n".encode())
                time.sleep(PRINT_SECONDS)

    def _busy_share(self) -> float:
        """Return the share of a second that QEMU runs: it is small if all processors of the machine wait."""
        before = self._ticks()
        time.sleep(1)
        return max(self._ticks() - before, 0) / os.sysconf("SC_CLK_TCK")

    def _ticks(self) -> int:
        if self._qemu.poll() is not None:
            return 0
        fields = Path(f"/proc/{self._qemu.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])


def _ignore(_text: str) -> None:
    pass


@contextlib.contextmanager
def booted(kernel: Kernel, disks: list[Path], memory: str = "1500", sleep: str = "on") -> Iterator[Machine]:
    """Yield a machine that has booted. CLOCK explains `sleep`."""
    with tempfile.TemporaryDirectory(prefix="lockd-machine-", dir="/var/tmp") as name:
        machine = Machine(Path(name), kernel, disks, memory, sleep)
        try:
            yield machine
        finally:
            machine.end()
