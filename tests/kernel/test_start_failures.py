"""A start that fails says why, with an exit code that tells whether another start could go better.

A supervisor starts lockd again after the exit code 1, but not after 3: what this host cannot do today, it
cannot do tomorrow.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.cost import children_of
from lockd.kernel.calls import BPF_MAP_CREATE, BPF_PROG_LOAD, SYS_BPF, SYS_PERF_EVENT_OPEN
from tests.kernel.test_doctor import WITHOUT_BTF, where
from tests.support.lockd_process import CHECKOUT, ROOT, START_SECONDS, Lockd, is_lack
from tests.support.workload import Start

pytestmark = pytest.mark.untimed

FAILED, CANNOT = 1, 3
BPF_RAW_TRACEPOINT_OPEN = 17
"""The command of bpf() that attaches a program to a raw tracepoint, or by a trampoline."""
BY_TRACEPOINTS = {"mode": "calls", "mechanism": "tracepoint"}
"""The configuration of `futex` with hooks that are attached to perf events."""
WITHOUT_KILL = ("setpriv", "--bounding-set=-kill", "--inh-caps=-kill")
"""What runs a command without CAP_KILL. lockd then cannot signal the exporter, which is another user's."""
WITHOUT_RESOURCE = ("setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource")
"""What runs a command without CAP_SYS_RESOURCE, so that it cannot raise a hard limit."""
OF_A_CONTAINER = ("unshare", "--mount", "--uts", "--ipc", "--cgroup")


@pytest.fixture(scope="module", autouse=True)
def hooks(host: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """How many hooks a daemon says it has attached where nothing fails. Its start also compiles the programs
    for the daemons of the tests."""
    daemon = Lockd(tmp_path_factory.mktemp("usual"))
    assert daemon.stop() == 0, "".join(daemon.log)
    return hooks_of(daemon)


def hooks_of(daemon: Lockd) -> str:
    (words,) = re.findall(r"attached (\d+ of \d+) hooks", "".join(daemon.log))
    return str(words)


def failed(*before: str | Path, kill: str = "", options: Sequence[str] = ()) -> tuple[int, str]:
    """Return the exit code and the log of a daemon that does not start.

    If `kill` is not empty, the daemon's child that runs this module is killed. A daemon that serves all the
    same was faster than that, and another one is started.
    """
    command = [*before, *CHECKOUT, "run", "--web.listen-address=127.0.0.1:0", *options]
    deadline = time.monotonic() + START_SECONDS
    while True:
        code, log = ended_or_serving(command, kill, deadline)
        if code is not None:
            assert "Traceback" not in log, log
            return code, log
        assert kill, f"it serves:\n{log}"


def ended_or_serving(command: Sequence[str | Path], kill: str, deadline: float) -> tuple[int | None, str]:
    """Run a daemon until it ends or serves. Return its exit code, or None if it served, and its log."""
    daemon = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    reader = threading.Thread(target=read_into, args=(log, daemon.stderr), daemon=True)
    reader.start()
    is_killed = not kill
    try:
        while daemon.poll() is None:
            if any("serving on " in line for line in log):
                return None, "".join(log)
            assert time.monotonic() < deadline, f"it neither ends nor serves:\n{''.join(log)}"
            is_killed = is_killed or kill_child(daemon.pid, kill)
            time.sleep(0.01)
    finally:
        daemon.kill()
        daemon.wait()
    reader.join(max(0.0, deadline - time.monotonic()))
    assert is_killed, f"no child runs {kill}"
    return daemon.returncode, "".join(log)


def read_into(lines: list[str], file: Iterable[str]) -> None:
    for line in file:
        lines.append(line)


def kill_child(parent: int, module: str) -> bool:
    """Kill the child that runs a module. Return whether there was one."""
    for pid, command in children_of(parent).items():
        if f"process/isolation.py {module}" in command:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
    return False


def refusing(error: str, *call: int) -> Sequence[str | Path]:
    return sys.executable, Path(__file__).with_name("refusing.py"), error, *map(str, call), "--"


@pytest.mark.parametrize("before", [(), WITHOUT_KILL], ids=["root", "without CAP_KILL"])
def test_a_loader_that_is_killed(before: Sequence[str]) -> None:
    code, log = failed(*before, kill="lockd.load")
    assert code == FAILED
    assert "loader: ended by SIGKILL" in log


def test_no_btf_without_the_right_to_kill() -> None:
    code, log = failed(*where(WITHOUT_BTF), *WITHOUT_KILL)
    assert code == CANNOT, log
    assert "/sys/kernel/btf/vmlinux" in log


@pytest.mark.parametrize("before", [(), WITHOUT_KILL], ids=["root", "without CAP_KILL"])
def test_an_exporter_that_is_killed_before_it_serves(before: Sequence[str]) -> None:
    code, log = failed(*before, kill="lockd.export")
    assert code == FAILED, log
    assert "exporter: ended by SIGKILL before it served anything" in log


@pytest.mark.parametrize(
    ("error", "call", "code"),
    [
        ("ENOMEM", (SYS_BPF, BPF_MAP_CREATE), FAILED),
        ("EPERM", (SYS_BPF, BPF_MAP_CREATE), CANNOT),
        ("ENOMEM", (SYS_BPF, BPF_PROG_LOAD), FAILED),
        ("EMFILE", (SYS_BPF, BPF_RAW_TRACEPOINT_OPEN), FAILED),
        ("ENFILE", (SYS_PERF_EVENT_OPEN,), FAILED),
    ],
)
def test_what_may_pass_is_told_from_what_stays(
    error: str, call: tuple[int, ...], code: int, tmp_path: Path
) -> None:
    config = tmp_path / "lockd.yaml"
    config.write_text("programs: {futex: {mode: calls}}")  # by default no perf event is opened
    done, log = failed(*refusing(error, *call), options=(f"--config.file={config}",))
    assert done == code, log
    assert os.strerror(getattr(errno, error)) in log


def test_a_program_that_the_kernel_refuses_is_no_lack_of_the_host(tmp_path: Path) -> None:
    """A refusal has the exit code of a lack. But tests are skipped for a lack, and fail for a refusal."""
    config = tmp_path / "lockd.yaml"
    config.write_text("programs: {futex: {enabled: false}, kernel_locks: {enabled: false}}")
    code, log = failed(*refusing("EPERM", SYS_BPF, BPF_PROG_LOAD), options=(f"--config.file={config}",))
    assert code == CANNOT, log
    assert "on_sched_switch: the kernel refuses it" in log
    assert not is_lack(log)
    assert is_lack("lockd: error: none of the programs can run here: fentry: this kernel has no function f()")


def test_futex_calls_that_no_hook_can_show_leave_the_rest(tmp_path: Path) -> None:
    """A tracepoint of a system call is attached to a perf event. What the other programs need is not."""
    config = {"programs": {"futex": BY_TRACEPOINTS}}
    expected = {"futex": False, "offcpu": True, "kernel_locks": True}
    assert attached(tmp_path, config, refusing("EPERM", SYS_PERF_EVENT_OPEN)) == expected


def test_switches_that_no_hook_can_show_leave_the_rest(tmp_path: Path) -> None:
    """The code for switches is compiled all the same, because the sampler reads its maps. The macros that are
    defined for its hooks are missing then."""
    config = {"programs": {"futex": BY_TRACEPOINTS, "kernel_locks": {"enabled": False}}}
    expected = {"futex": True, "offcpu": False, "kernel_locks": False}
    assert attached(tmp_path, config, refusing("EPERM", SYS_BPF, BPF_RAW_TRACEPOINT_OPEN)) == expected


def attached(directory: Path, config: dict[str, Any], before: Sequence[str | Path]) -> dict[str, bool]:
    """Return by program whether any of its hooks is attached, for a daemon that these words start."""
    daemon = Lockd(directory, config, [*before, *CHECKOUT])
    try:
        metrics = daemon.metrics()
    finally:
        code = daemon.stop()
    assert code == 0, "".join(daemon.log)
    return {
        program: metrics.sum("lockd_hook_attached", program=program) > 0
        for program in ("futex", "offcpu", "kernel_locks")
    }


def test_few_descriptors_are_made_more(tmp_path: Path, hooks: str) -> None:
    daemon = Lockd(tmp_path, program=["prlimit", "--nofile=48:4096", *CHECKOUT])
    assert daemon.stop() == 0, "".join(daemon.log)
    assert hooks_of(daemon) == hooks


def test_too_few_descriptors_are_refused() -> None:
    code, log = failed("prlimit", "--nofile=48:48", *WITHOUT_RESOURCE)
    assert code == CANNOT, log
    assert re.search(r"RLIMIT_NOFILE.* 48\b.*LimitNOFILE=512", log)


@pytest.mark.parametrize("options", [("--mount-proc",), ()], ids=["its own /proc", "the host's /proc"])
def test_a_pid_namespace_is_refused(options: Sequence[str]) -> None:
    """In a pid namespace, the process ids that the programs count by would be those of other processes."""
    code, log = failed("unshare", "--pid", "--fork", *options)
    assert code == CANNOT, log
    for part in ("PID namespace of its own", "hostPID: true", "--pid=host"):
        assert part in log


def test_the_proc_of_a_pid_namespace_is_refused() -> None:
    """lockd itself has the process ids of the host, but sees the /proc of a pid namespace."""
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", "echo; exec sleep 300"],
        stdout=subprocess.PIPE,
    ) as other:
        try:
            assert other.stdout
            other.stdout.readline()
            code, log = failed("nsenter", f"--mount=/proc/{other.pid}/ns/mnt", f"--wd={ROOT}")
        finally:
            other.kill()
    assert code == CANNOT, log
    assert "/proc: this process is not in it" in log


def test_a_container_with_the_pids_of_the_host(tmp_path: Path, workload: Start) -> None:
    daemon = Lockd(tmp_path, program=[*OF_A_CONTAINER, *CHECKOUT])
    try:
        one = workload("mutex_handover", 20, 1000)
        truth = one.run()["futex"]["lock"]
        metrics = daemon.metrics()
        one.finish()
    finally:
        code = daemon.stop()
    assert code == 0, "".join(daemon.log)
    labels = {"comm": one.comm, "kind": "lock"}
    assert metrics.sum("lockd_futex_blocked_seconds_count", **labels) == truth["blocked"] == 20
