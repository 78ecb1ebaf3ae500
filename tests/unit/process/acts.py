"""Acts of somebody who has taken over a process of lockd.

`python3 acts.py PROCESS PLAN` runs the real main() of that process, with a plan in place of the work. The
plan is a list in JSON of acts from `ACTS` with their arguments. What comes of each act is printed: "done", or
the name of the error.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import mmap
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
CALLS = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "execveat": 322, "bpf": 321,
    "perf_event_open": 298, "mount": 165, "umount2": 166, "unshare": 272, "setns": 308, "keyctl": 250,
    "add_key": 248, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "io_uring_setup": 425, "io_uring_enter": 426, "clone3": 435, "openat2": 437, "creat": 85,
    "pidfd_open": 434, "pidfd_getfd": 438, "kcmp": 312, "memfd_create": 319, "userfaultfd": 323,
    "chroot": 161, "pivot_root": 155, "reboot": 169, "swapon": 167, "kexec_load": 246,
    "personality": 135, "process_madvise": 440, "move_pages": 279, "quotactl": 179, "fsopen": 430,
    "open_tree": 428, "move_mount": 429, "acct": 163, "settimeofday": 164, "setuid": 105,
    "setresuid": 117, "setgid": 106, "bind": 49, "connect": 42, "socket": 41, "kill": 62, "tgkill": 234,
    "tkill": 200, "rt_sigqueueinfo": 129, "sched_setscheduler": 144, "setpriority": 141, "fork": 57,
    "vfork": 58, "symlink": 88, "mknod": 133, "setxattr": 188, "inotify_init1": 294,
    "fanotify_init": 300, "syslog": 103, "vhangup": 153, "iopl": 172, "modify_ldt": 154,
    "name_to_handle_at": 303, "ioprio_set": 251, "shmget": 29, "msgget": 68, "mq_open": 240,
    "timer_create": 222,
}  # fmt: skip
"""Numbers of system calls on x86_64, the architecture on which the tests run."""


def raw(call: str, *arguments: int) -> None:
    """Make a system call with these arguments, and zeros for the rest."""
    values = [ctypes.c_long(one) for one in (*arguments, *[0] * (6 - len(arguments)))]
    if LIBC.syscall(ctypes.c_long(CALLS[call]), *values) < 0:
        raise OSError(ctypes.get_errno(), call)


def open_file(path: str, flags: int, mode: int = 0o600) -> None:
    os.close(os.open(path, flags, mode))


def write_memory(path: str, address: int) -> None:
    """Write to the memory of a process by its file `mem` in procfs."""
    file = os.open(path, os.O_RDWR)
    os.pwrite(file, b"changed!", address)


def write_by_reading(path: str, address: int) -> None:
    os.pwrite(os.open(path, os.O_RDONLY), b"changed!", address)


def read_memory(path: str, address: int, expected: str) -> None:
    assert os.pread(os.open(path, os.O_RDONLY), len(expected), address) == expected.encode()


def write_by_call(pid: int, address: int) -> None:
    text = ctypes.create_string_buffer(b"changed!")
    here = (ctypes.c_size_t * 2)(ctypes.addressof(text), len(text))
    there = (ctypes.c_size_t * 2)(address, len(text))
    raw("process_vm_writev", pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)


def thread() -> None:
    done = threading.Event()
    one = threading.Thread(target=done.set)
    one.start()
    one.join()
    assert done.is_set()


def child() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def read_file(path: str) -> None:
    with open(path, "rb") as file:
        file.read(100)


def change_file(call: str, path: str) -> None:
    changes: dict[str, Callable[[], object]] = {
        "chmod": lambda: os.chmod(path, 0o777),
        "chown": lambda: os.chown(path, 65534, 65534),
        "unlink": lambda: os.unlink(path),
        "rename": lambda: os.rename(path, f"{path}.moved"),
        "link": lambda: os.link(path, f"{path}.linked"),
        "symlink": lambda: os.symlink(path, f"{path}.symlink"),
        "mkdir": lambda: os.mkdir(f"{path}.made"),
        "truncate": lambda: os.truncate(path, 0),
        "utime": lambda: os.utime(path),
        "mkfifo": lambda: os.mkfifo(f"{path}.fifo"),
        "setxattr": lambda: os.setxattr(path, "user.lockd", b"1"),
    }
    changes[call]()


def type_into_terminal() -> None:
    import fcntl

    fcntl.ioctl(0, 0x5412, b"x")  # TIOCSTI


def limit_of(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))


def demangle(symbol: str, expected: str) -> None:
    from lockd.names.objects.demangle import Demangler

    assert Demangler().name(symbol) == expected


def foreign_call() -> None:
    """Make a 32-bit system call. Such calls have other numbers; the call ends a confined process."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov $20 (getpid), %eax; int $0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()


ACTS: dict[str, Callable[..., object]] = {
    "raw": raw,
    "open": open_file,
    "write memory": write_memory,
    "write memory by a descriptor for reading": write_by_reading,
    "read memory": read_memory,
    "process_vm_writev": write_by_call,
    "exec": lambda path: os.execv(path, [path]),
    "connect": lambda path: socket.socket(socket.AF_UNIX).connect(path),
    "socket": lambda family, kind: socket.socket(family, kind).close(),
    "kill": lambda pid: os.kill(pid, signal.SIGURG),
    "change": change_file,
    "type into the terminal": type_into_terminal,
    "limit": limit_of,
    "thread": thread,
    "child": child,
    "read": read_file,
    "foreign call": foreign_call,
    "demangle": demangle,
    "become": os.setresuid,
    "log": lambda text: logging.getLogger("lockd").error(text),
}


def come_of(act: str, *arguments: Any) -> str:
    try:
        ACTS[act](*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except RuntimeError as error:  # Python's words for a thread that cannot be started
        return str(error)
    except AssertionError as error:
        return repr(error)
    return "done"


def perform(plan: list[list[Any]]) -> None:
    for act, *arguments in plan:
        if act == "say":
            print(json.dumps(Path(*arguments).read_text()), flush=True)
            continue
        print(json.dumps(come_of(act, *arguments)), flush=True)


def exporter(plan: list[list[Any]]) -> int:
    from lockd.export import __main__ as process
    from lockd.messages import SERVE

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(SERVE)

    async def serve(*_: object) -> None:
        perform(plan)

    process._serve = serve
    sys.argv[1:] = [f"--control-fd={theirs.detach()}"]
    return process.main()


def namer(plan: list[list[Any]]) -> int:
    from lockd.names import server as process
    from lockd.names.protocol import NamerSettings

    def serve(*_: object) -> None:
        perform(plan)

    process.serve = serve
    _, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bench = os.memfd_create("bench")
    os.truncate(bench, mmap.PAGESIZE)
    settings = NamerSettings("/proc", logging.INFO, [], 1.0, [], None, bench, theirs.detach())
    asked = os.memfd_create("settings")
    os.pwrite(asked, settings.to_json(), 0)
    sys.argv[1:] = [str(asked)]
    return process.main()


def unfiltered(plan: list[list[Any]]) -> int:
    """Run the namer without its filter of system calls."""
    from lockd.process import confinement

    confinement.confine = lambda *_, **__: None
    return namer(plan)


if __name__ == "__main__":
    who, plan = sys.argv[1], json.loads(sys.argv[2])
    sys.exit({"exporter": exporter, "namer": namer, "unfiltered namer": unfiltered}[who](plan))
