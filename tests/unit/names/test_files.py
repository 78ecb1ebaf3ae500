"""Files that the namer reads by paths that processes choose: real processes of several users."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockd.names.objects.jit import JitNames
from lockd.names.objects.process_files import open_regular

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: starts processes of several users")

USER, OTHER = 12345, 12346
LINE = "1000 20 told\n"
PROCESS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, BIND, PRIVATE = 0x20000, 0x10000000, 0x1000, 1 << 18 | 1 << 14
place = f"/tmp/perf-{os.getpid()}.map"
kind, target = sys.argv[1:]
def check(failed):
    if failed:
        raise OSError(ctypes.get_errno(), kind)
if kind == "written":
    with open(place, "w") as file:
        file.write(target)
elif kind == "link":
    os.symlink(target, place)
else:
    user = os.getuid()
    check(libc.unshare(NEWNS | (NEWUSER if user else 0)))
    if user:
        numbers = f"{user} {user} 1"
        for name, line in ("setgroups", "deny"), ("uid_map", numbers), ("gid_map", numbers):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    check(libc.mount(b"none", b"/", None, PRIVATE, None))
    source = f"/proc/self/fd/{os.open(target, os.O_PATH)}"
    check(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
    open(place, "w").close()
    check(libc.mount(source.encode(), place.encode(), None, BIND, None))
print("ready", flush=True)
sys.stdin.read()
"""

Start = Callable[..., Path]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a process of a user, with a perf map of some kind, and returns the
    directory of the process in procfs."""
    started: list[subprocess.Popen[bytes]] = []

    def start(user: int, kind: str, target: object, *before: str, **more: str) -> Path:
        command = [*before, os.path.realpath(sys.executable), "-I", "-c", PROCESS, kind, str(target)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=user, group=user, extra_groups=[],
            env=more, cwd="/",
        )  # fmt: skip
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        return Path(f"/proc/{process.pid}")

    yield start
    for process in started:
        process.communicate()
        Path(f"/tmp/perf-{process.pid}.map").unlink(missing_ok=True)


@pytest.fixture
def secret() -> Iterator[Path]:
    """Yield a file that only root may read, in a directory that is open to everybody; pytest's directories
    are not."""
    with tempfile.TemporaryDirectory(prefix="lockd-secret-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "secret"
        path.write_text(LINE)
        path.chmod(0o600)
        yield path


def told(process: Path) -> str:
    found = JitNames(process).function(0x1000, [])
    return found[1] if found else ""


@pytest.mark.parametrize("user", [0, USER])
def test_what_a_process_wrote_itself_is_believed(start: Start, user: int) -> None:
    assert told(start(user, "written", LINE)) == "told"


@pytest.mark.parametrize("kind", ["link", "bound"])
def test_no_users_process_has_a_file_of_roots_read(start: Start, secret: Path, kind: str) -> None:
    assert told(start(USER, kind, secret)) == ""


@pytest.mark.parametrize("user", [0, USER])
def test_no_symbolic_link_is_followed(start: Start, secret: Path, user: int) -> None:
    os.chown(secret, user, user)
    assert told(start(user, "link", secret)) == ""


def test_what_another_user_wrote_is_not_believed_of_roots_process(start: Start) -> None:
    process = start(0, "written", LINE)
    os.chown(f"/tmp/perf-{process.name}.map", USER, USER)
    assert told(process) == ""


def test_a_file_that_has_other_names_is_not_believed(start: Start, tmp_path: Path) -> None:
    """A user may have made a link to a file of root's where the kernel allows it
    (fs.protected_hardlinks=0)."""
    process = start(0, "written", LINE)
    os.link(f"/tmp/perf-{process.name}.map", tmp_path / "other")
    assert told(process) == ""


def test_a_process_between_two_users_has_no_files(start: Start) -> None:
    """A process that runs a setuid program has the ids of two users."""
    between = f"import os, sys; os.setresuid({USER}, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = start(0, "written", LINE, os.path.realpath(sys.executable), "-I", "-c", between)
    assert Path(f"/tmp/perf-{process.name}.map").stat().st_uid == 0
    assert told(process) == ""


@pytest.mark.parametrize("user", [0, USER])
def test_no_file_of_procfs_is_read(start: Start, user: int) -> None:
    """The environment of the process has a line like those of a perf map."""
    process = start(user, "bound", "/proc/self/environ", "/usr/bin/env", f"X=\n{LINE}")
    assert LINE.encode() in (process / "environ").read_bytes()
    assert told(process) == ""


@pytest.mark.parametrize("path", ["/proc/kmsg", "/sys/kernel/mm/transparent_hugepage/enabled"])
def test_no_file_of_the_kernel_is_opened_whoever_asks(path: str) -> None:
    with pytest.raises(OSError, match=r"a file of (procfs|sysfs)"):
        open_regular("/", os.fsencode(path))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root directory with a file in it, and another file outside of it."""
    (tmp_path / "file").write_text("outside")
    (tmp_path / "root/usr/lib").mkdir(parents=True)
    (tmp_path / "root/usr/lib/file").write_text("inside")
    return tmp_path / "root"


def found(root: Path, path: str) -> str:
    with open(open_regular(root, path.encode()), "rb") as file:
        return file.read().decode()


@pytest.mark.parametrize(
    "path",
    [
        "usr/lib/file",
        "/usr//lib/./file",
        "/usr/lib/../lib/file",
        "/../../usr/lib/file",
        "usr/../../usr/lib/file",
    ],
)
def test_a_path_begins_at_the_root(root: Path, path: str) -> None:
    assert found(root, path) == "inside"


@pytest.mark.parametrize(
    "target",
    ["/usr/lib", "usr/lib", "./usr/../usr/lib/.", "../usr/lib", "../../../usr/lib", "/lib64", "usr/lib/"],
)
def test_and_so_do_links_in_it(root: Path, target: str) -> None:
    (root / "lib64").symlink_to("usr/lib")
    (root / "link").symlink_to(target)
    assert found(root, "/link/file") == "inside"


@pytest.mark.parametrize("target", ["../file", "/../file", "usr/../../file", "/file"])
def test_no_link_leads_out_of_it(root: Path, target: str) -> None:
    (root / "link").symlink_to(target)
    with pytest.raises(FileNotFoundError):
        open_regular(root, b"link")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("one", errno.ELOOP),
        ("/one/file", errno.ELOOP),
        ("usr/lib/file/more", errno.ENOTDIR),
        ("usr/lib/none", errno.ENOENT),
        ("usr/lib", errno.EINVAL),
        ("usr/..", errno.EISDIR),
        ("", errno.EISDIR),
    ],
)
def test_where_there_is_no_file_nothing_stays_open(root: Path, path: str, error: int) -> None:
    (root / "one").symlink_to("two")
    (root / "two").symlink_to("one")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(
        OSError, match=os.strerror(error) if error != errno.EINVAL else "no regular file"
    ) as got:
        open_regular(root, path.encode())
    assert got.value.errno == error
    assert os.listdir("/proc/self/fd") == before
