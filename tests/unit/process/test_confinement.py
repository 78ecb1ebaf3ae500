"""What somebody who has taken over a process of lockd can do in its real confinement: the acts of acts.py."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockd.names.server import READING
from lockd.process import privileges
from tests.unit.process.acts import CALLS

ACTS = Path(__file__).with_name("acts.py")
ROOT = Path(__file__).parents[3]
REFUSING = Path(__file__).parents[2] / "kernel/refusing.py"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the processes start as root")

DONE, NOT_THERE = "done", "ENOSYS"
WRITING = {
    "O_WRONLY": os.O_WRONLY,
    "O_RDWR": os.O_RDWR,
    "both": os.O_WRONLY | os.O_RDWR,
    "O_APPEND": os.O_WRONLY | os.O_APPEND,
    "O_TRUNC": os.O_RDONLY | os.O_TRUNC,
    "O_CREAT": os.O_RDONLY | os.O_CREAT,
    "O_EXCL": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}
CHANGES = (
    "chmod", "chown", "unlink", "rename", "link", "symlink", "mkdir", "truncate", "utime", "mkfifo",
    "setxattr",
)  # fmt: skip
VICTIM = """
import ctypes, sys
text = ctypes.create_string_buffer(b"as it was")
print(ctypes.addressof(text), flush=True)
sys.stdin.read()
print(text.value.decode(), flush=True)
"""


class Victim:
    """A process that is root's, unless the options say otherwise, with a text at an address in its memory."""

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", VICTIM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        assert self._process.stdout
        self.pid, self.address = self._process.pid, int(self._process.stdout.readline())

    def text(self) -> str:
        """End the process and return what its text is at the end."""
        return self._process.communicate()[0].strip()


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a file that everybody may write, in a directory that everybody may write."""
    with tempfile.TemporaryDirectory(prefix="lockd-acts-", dir="/var/tmp") as name:
        os.chmod(name, 0o777)
        path = Path(name) / "file"
        path.write_text("as it was\n")
        path.chmod(0o666)
        yield path


def namers_user() -> str:
    try:
        return pwd.getpwnam("lockd-namer").pw_name
    except KeyError:
        return "nobody"


@pytest.fixture(params=["root", namers_user()])
def victim(request: pytest.FixtureRequest) -> Iterator[Victim]:
    """Yield a process of root's, or of the very user that the namer runs as."""
    user = pwd.getpwnam(request.param)
    one = Victim(user=user.pw_uid, group=user.pw_gid, extra_groups=[], cwd="/")
    yield one
    assert one.text() == "as it was"


def run(who: str, *plan: tuple[Any, ...], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ACTS, who, json.dumps(plan)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment}
    )


def come_of(who: str, *plan: tuple[Any, ...], code: int = 0) -> list[str]:
    """Return what came of each act of the plan in the confinement of that process."""
    done = run(who, *plan)
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def succeed(who: str, *plan: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    """Return the acts of the plan that succeeded."""
    return {act for act, come in zip(plan, come_of(who, *plan), strict=True) if come == DONE}


CONFINED = pytest.mark.parametrize("who", ["exporter", "namer"])


@CONFINED
def test_no_file_is_opened_for_writing_or_changed(who: str, place: Path) -> None:
    new = f"{place}.new"
    plan = [("open", new if flags & os.O_CREAT else str(place), flags) for flags in WRITING.values()]
    plan.append(("open", str(place.parent), os.O_TMPFILE | os.O_RDWR))
    plan += [("change", call, str(place)) for call in CHANGES]
    assert set(come_of(who, *plan)) == {NOT_THERE}
    assert [path.name for path in place.parent.iterdir()] == ["file"]
    assert place.read_text() == "as it was\n"
    assert come_of(who, ("read", str(place))) == [DONE]


@CONFINED
def test_no_other_process_is_written_to_stopped_or_limited(who: str, victim: Victim) -> None:
    memory = f"/proc/{victim.pid}/mem"
    plan: list[tuple[Any, ...]] = [
        ("write memory", memory, victim.address),
        ("write memory", f"/proc/{victim.pid}/task/{victim.pid}/mem", victim.address),
        ("write memory by a descriptor for reading", memory, victim.address),
        ("process_vm_writev", victim.pid, victim.address),
        ("raw", "ptrace", 16, victim.pid),  # PTRACE_ATTACH
        ("raw", "ptrace", 0x4206, victim.pid),  # PTRACE_SEIZE
        ("raw", "pidfd_open", victim.pid),
        ("raw", "kcmp", victim.pid, victim.pid),
        ("raw", "sched_setscheduler", victim.pid),
        ("raw", "setpriority", 0, victim.pid, 19),
        ("limit", victim.pid),
        ("kill", victim.pid),
        ("kill", os.getpid()),
    ]
    assert not succeed(who, *plan)


@CONFINED
def test_nothing_is_executed(who: str) -> None:
    paths = ["/bin/true", "/usr/bin/c++filt", os.path.realpath(sys.executable)]
    assert set(come_of(who, *(("exec", path) for path in paths))) == {NOT_THERE}


@CONFINED
def test_no_socket_is_made_whatever_it_is_for(who: str) -> None:
    families = [
        socket.AF_UNIX,
        socket.AF_INET,
        socket.AF_INET6,
        socket.AF_NETLINK,
        socket.AF_PACKET,
        socket.AF_ALG,
    ]
    kinds = [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW]
    plan = [("socket", int(family), int(kind)) for family in families for kind in kinds]
    assert set(come_of(who, *plan)) == {NOT_THERE}


@CONFINED
def test_what_no_process_of_lockds_needs_is_not_there(who: str) -> None:
    """Each call would also fail without a filter, since it has no arguments, but with another error."""
    plan = [("raw", call) for call in CALLS]
    assert dict(zip(CALLS, come_of(who, *plan), strict=True)) == dict.fromkeys(CALLS, NOT_THERE)


@CONFINED
def test_nothing_is_typed_into_the_terminal_it_was_started_from(who: str) -> None:
    assert come_of(who, ("type into the terminal",)) == [NOT_THERE]


@CONFINED
def test_calls_of_another_kind_of_machine_end_it(who: str) -> None:
    assert come_of(who, ("foreign call",), code=-signal.SIGSYS) == []


def test_the_exporter_reads_nothing_of_others_and_can_do_its_work() -> None:
    victim = Victim()
    forbidden = [("read", "/etc/shadow"), ("read", f"/proc/{victim.pid}/environ"), ("child",)]
    forbidden.append(("read memory", f"/proc/{victim.pid}/mem", victim.address, "as it was"))
    needed = [("thread",), ("read", "/etc/passwd"), ("read", "/proc/self/stat")]
    assert succeed("exporter", *forbidden, *needed) == set(needed)
    assert victim.text() == "as it was"


def test_the_namer_reads_what_anybody_has_and_can_do_its_work(victim: Victim) -> None:
    forbidden = [("thread",), ("become", 0, 0, 0)]
    needed = [
        ("read", "/etc/shadow"),
        ("read", f"/proc/{victim.pid}/environ"),
        ("read", f"/proc/{victim.pid}/root/etc/shadow"),
        ("read", f"/proc/{victim.pid}/exe"),
        ("read", "/proc/kallsyms"),
        ("read memory", f"/proc/{victim.pid}/mem", victim.address, "as it was"),
        ("demangle", "_ZN4shop8Registry3addEi", "shop::Registry::add"),
        ("demangle", "_RNvCs1234_7mycrate3foo", "mycrate::foo"),
        ("child",),
    ]
    assert succeed("namer", *forbidden, *needed) == set(needed)


def test_even_without_its_filter_the_namer_could_not_write_to_roots_files(place: Path) -> None:
    """The namer's user and capabilities are enough to prevent that. For the rest the filter is needed:
    CAP_SYS_PTRACE is enough to write to another process's memory by ptrace() or process_vm_writev()."""
    place.chmod(0o644)
    victim = Victim()
    memory = f"/proc/{victim.pid}/mem"
    plan: list[tuple[Any, ...]] = [
        ("write memory", memory, victim.address),
        ("write memory by a descriptor for reading", memory, victim.address),
        ("open", str(place), os.O_WRONLY),
        ("change", "chmod", str(place)),
        ("change", "chown", str(place)),
        ("become", 0, 0, 0),
        ("kill", victim.pid),
        ("raw", "bpf"),
        ("raw", "mount"),
    ]
    errors = ["EACCES", "EBADF", "EACCES", "EPERM", "EPERM", "EPERM", "EPERM"]
    assert come_of("unfiltered namer", *plan)[:7] == errors
    assert not succeed("unfiltered namer", *plan)
    assert come_of("unfiltered namer", ("process_vm_writev", victim.pid, victim.address)) == [DONE]
    assert victim.text() == "changed!"


def test_what_the_namer_is() -> None:
    status = dict(
        line.split(":\t", 1)
        for line in json.loads(run("namer", ("say", "/proc/self/status")).stdout).splitlines()
    )
    reading = sum(1 << privileges.NUMBERS[name] for name in READING)
    assert {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {
        "CapInh": 0, "CapPrm": reading, "CapEff": reading, "CapBnd": reading, "CapAmb": 0,
    }  # fmt: skip
    assert set(status["Uid"].split()) == {str(pwd.getpwnam(namers_user()).pw_uid)}
    assert status["Groups"].strip() == ""
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


@CONFINED
def test_without_the_library_it_does_not_run(who: str, tmp_path: Path) -> None:
    (tmp_path / "seccomp.py").write_text("raise ImportError\n")
    done = run(who, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert "rule: install Debian's package python3-seccomp" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_call_that_the_library_does_not_know_is_left_out() -> None:
    """A list may be newer than the library. The library knows all other calls, so no name in the lists is
    misspelled."""
    script = """
from lockd.process.confinement import COMPUTING, EXPORTER, NAMER, is_known, confine
print([call for call in NAMER | EXPORTER if not is_known(call)], flush=True)
confine(COMPUTING | {"newer_than_all": (), "and_so_is_this": ((0, "EQ", 1),)})
print("confined")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\nconfined\n"


@CONFINED
def test_where_the_kernel_takes_no_filter_it_does_not_run(who: str) -> None:
    """The kernel refuses the filter both by seccomp() and by prctl()."""
    refusing = [sys.executable, str(REFUSING), "EINVAL", "317", "--"]
    refusing += [sys.executable, str(REFUSING), "EINVAL", "157", "22", "--"]
    done = subprocess.run(
        [*refusing, sys.executable, ACTS, who, "[]"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "the kernel refused the filter of system calls" in done.stderr
    assert "Traceback" not in done.stderr


@CONFINED
def test_prctl_will_do(who: str) -> None:
    """prctl() sets the filter where seccomp() is refused: systemd's filter may not know this newer call."""
    command = [sys.executable, str(REFUSING), "EPERM", "317", "--", sys.executable, ACTS, who]
    plan = json.dumps([["exec", "/bin/true"]])
    done = subprocess.run([*command, plan], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == NOT_THERE


@CONFINED
def test_the_journal_is_told_from_within(who: str) -> None:
    """The socket of the journal is opened before the process is confined. Here another socket takes the place
    of journald's, in a mount namespace of its own."""
    script = f"""
import ctypes, os, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.unshare(0x20000) and not libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None)
assert not libc.mount(b"none", b"/run", b"tmpfs", 0, None)
os.makedirs("/run/systemd/journal")
journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
journal.bind("/run/systemd/journal/socket")
os.chmod("/run/systemd/journal/socket", 0o666)
about = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{{about.st_dev}}:{{about.st_ino}}"
subprocess.run([sys.executable, {str(ACTS)!r}, {who!r}, '[["log", "from within"]]'], check=True)
journal.setblocking(False)
while True:
    try:
        sys.stdout.buffer.write(journal.recv(65536))
    except BlockingIOError:
        break
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "MESSAGE=from within\n" in done.stdout
    assert f"LOCKD_PROCESS={who}\n" in done.stdout
