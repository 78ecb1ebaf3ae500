"""A machine that QEMU emulates, without KVM, and the words with the agent in it."""

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
"""For the kernel to print some stacks on its console."""
NUDGE_SECONDS = 5.0
"""Of silence."""
SLACK_SECONDS = 60.0
"""An emulated machine is slow: how much longer than asked for an answer may take."""


PROCESSORS = (
    # One thread for all: with one each, QEMU races with a kernel that patches its own code, as for a
    # kprobe, and the kernel dies of an instruction that was never there.
    # Without cmpxchg16b, with which kernels take memory: once in some ten minutes one died right after it,
    # of flags that QEMU 7.2 had wrong.
    # Without erms, for which kernels copy and clear memory by single bytes, each of them an instruction.
    "-smp", "2", "-cpu", "max,la57=off,cx16=off,erms=off", "-accel", "tcg,thread=single",
)  # fmt: skip

CLOCK = "shift=0,sleep={}"
"""A nanosecond passes with each instruction, however slow this host is at the moment: the times that a test
compares do not depend on who else uses the host.

Where all processors of the machine wait, its time passes as the host's does (on), or at once to what they
wait for (off). With `on`, where the host is busy, QEMU is late, and times in the machine are off by some
milliseconds. With `off`, what comes from outside, as from a disk, takes long by the clock of the machine."""

ONE_PROCESSOR = "maxcpus=1"
"""Until it has booted: with counted instructions, kernels before 6.5 would wait for another for ever."""
QUICK = "mitigations=off tsc=reliable rcupdate.rcu_expedited=1"
"""Detaching a hundred probes takes a second, not six."""


class VmLost(Exception):
    """The machine gave no answer in time: nothing is said about lockd."""


class KernelPanic(Exception):
    """The machine's kernel died, whoever is to blame."""


@dataclass(frozen=True)
class Done:
    """What a command in the machine came to; code -1: it could not be run."""

    code: int
    out: str


@dataclass(frozen=True)
class Kernel:
    """What a machine is started with. `init` as the kernel understands it; by default that of init.c."""

    image: Path
    initrd: Path
    init: str = ""


class Machine:
    """A running machine.

    `disks`: the first is its root, the second, if any, comes to be at /work. Nothing is written into them.
    `sleep` as of CLOCK.
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
                "setpriv", "--pdeathsig", "KILL",  # it must not outlive whoever wanted it
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
        """Since its start, by this host's clock, but for those in which it waited for one of its processors.

        All limits are by them: what a busy host leaves to it is no fault of the machine's.
        """
        waited = [0]
        for file in Path(f"/proc/{self._qemu.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # that thread has ended
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
        """What a shell command that must succeed prints."""
        done = self.run("sh", "-c", text, seconds=seconds)
        assert done.code == 0, f"{text}: exit code {done.code}: {done.out}"
        return done.out.strip()

    def get(self, url: str, seconds: float = 60) -> Done:
        """What an HTTP server in the machine answers; code -1 if nothing."""
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
        """Have QEMU's main loop go round once: it may wait for ever for a timer of processors that all wait.

        With counted instructions it sometimes misses that they do; what its main loop gets wakes them.
        """
        with contextlib.suppress(OSError):  # it has ended: the port will say so
            self._monitor.sendall(b"\n")
            self._monitor.recv(1 << 16, socket.MSG_DONTWAIT)

    def _lost(self, why: str) -> Exception:
        at_work = self._busy_share()
        self._print_blocked_tasks()
        self.end()  # whoever asks next hears at once
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
        """How much of a second QEMU runs: whether the machine's processors do something or all wait."""
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
    """A machine that has booted; `sleep` as of CLOCK."""
    with tempfile.TemporaryDirectory(prefix="lockd-machine-", dir="/var/tmp") as name:
        machine = Machine(Path(name), kernel, disks, memory, sleep)
        try:
            yield machine
        finally:
            machine.end()
