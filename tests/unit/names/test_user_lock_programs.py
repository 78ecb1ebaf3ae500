"""Names, kinds and sites of the locks of real programs, compiled in the ways that programs are."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockd.names.locks.user_locks import UserLock, UserNames
from tests.needs import need
from tests.support.ptraced import blocked_capture, blocked_thread

HERE = Path(__file__).parent
NO_TABLES = ("-fno-asynchronous-unwind-tables", "-fno-unwind-tables")
COMPILED = {
    "plain": ("gcc", "-O2", "-pthread"),
    "unoptimised": ("gcc", "-O0", "-pthread"),
    "static": ("gcc", "-O2", "-pthread", "-static"),
    "without-tables": ("gcc", "-O2", "-pthread", "-fomit-frame-pointer", *NO_TABLES),
    "frame-pointers": ("gcc", "-O2", "-pthread", "-fno-omit-frame-pointer", *NO_TABLES),
    "fixed": ("gcc", "-O2", "-pthread", "-no-pie"),
    "musl": ("musl-gcc", "-O2"),
    "static-musl": ("musl-gcc", "-O2", "-static"),
}
C = {  # by comm: the lock, or none if its name is the site, and the kind
    "global": (":global_mutex", "lock"),
    "file": (":static_mutex", "lock"),
    "inside": (":large+0xa0", "lock"),
    "read": (":rwlock", "lock"),
    "write": (":rwlock", "lock"),
    "inrw": (":large+0xc8", "lock"),
    "wait": (":cond", "cond"),
    "incond": (":large+0x100", "cond"),
    "sem": (":semaphore", "cond"),
    "barrier": (":barrier", "cond"),
    "once": (":once", "lock"),
    "heap": ("", "lock"),
    "pi": (":pi", "pi"),
    "join": ("", "cond"),
    "tls": (":own", "lock"),
    "back": (":back_mutex", "lock"),  # back from a condition variable, it waits for the mutex
}
GUESSED = {"pi": "pi", "back": "lock"}  # kinds that the call suggests; for the others it does not matter
MUSL = {  # in musl, these waits are for words in memory of the waiters, and functions have no names
    "wait": ("", "cond"), "incond": ("", "cond"), "barrier": ("", "cond"), "once": (":once", None),
}  # fmt: skip
CPP = {
    "mutex": (":shop::Registry::mutex", "lock", "mutex"),
    "unique": (":shop::Registry::mutex", "lock", "mutex"),
    "scoped": (":shop::Registry::mutex", "lock", "mutex"),
    "shared": (":shop::Registry::shared", "lock", "rwlock"),
    "exclusive": (":shop::Registry::shared", "lock", "rwlock"),
    "tlsmember": (":shop::Registry::own", "lock", "mutex"),
    "condition": (":shop::cv", "cond", "cond"),
    "conditionany": (":shop::cva", "cond", "cond"),
    "cpredicate": (":shop::cv", "cond", "cond"),
    "semaphore": (":shop::sem", "cond", None),
    "latch": (":shop::latch", "cond", None),
    "barrier": ("", "cond", None),
    "future": ("", "cond", "cond"),
    "callonce": (":shop::flag", "lock", "once"),
    "atomic": (":shop::word", "cond", "cond"),
    "guard": (":guard variable for shop::guard_caller()::s", "lock", "once"),
    "jointhread": ("", "cond", "join"),
}


@contextmanager
def running(*command: object, **options: object) -> Iterator[int]:
    """Run a program that is killed in the end, and yield its process id."""
    child = subprocess.Popen([str(part) for part in command], **options)  # type: ignore[call-overload]
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


def compiled(tmp: Path, name: str, compiler: tuple[str, ...], source: str = "user_waits.c") -> Path:
    need(compiler[0])
    program = tmp / name
    subprocess.run([*compiler, str(HERE / source), "-o", str(program)], check=True)
    return program


def named(names: UserNames, tgid: int, comm: str, guessed: str = "other") -> UserLock:
    tid, address, capture = blocked_capture(tgid, comm)
    return names.name_lock(tgid, tid, address, guessed, capture)


@pytest.mark.parametrize("has_debug_files", [True, False])
@pytest.mark.parametrize("way", COMPILED)
def test_c_as_it_is_compiled(way: str, has_debug_files: bool, tmp_path: Path) -> None:
    """The C library's debug files need not be installed, and on most hosts are not."""
    program = compiled(tmp_path, f"waits-{way}", COMPILED[way])
    names = UserNames() if has_debug_files else UserNames(debug_files=os.fsencode(tmp_path / "none"))
    with running(program) as tgid:
        for comm, expected in C.items():
            lock, kind = MUSL.get(comm, expected) if "musl" in way else expected
            found = named(names, tgid, comm, GUESSED.get(comm, "other"))
            site = f"{program.name}:{comm}_caller"
            assert found.site == site, (comm, found)
            assert found.lock == (program.name + lock if lock else site), (comm, found)
            if kind is not None or way == "static-musl":
                assert found.kind == (kind or "lock"), (comm, found)
            at = found.stack.index(site)
            assert found.stack[at : at + 2] == (site, f"{program.name}:{comm}_thread")


def test_a_handler_of_a_signal_was_called_by_what_was_interrupted(tmp_path: Path) -> None:
    with running(compiled(tmp_path, "waits", COMPILED["plain"])) as tgid:
        found = named(UserNames(), tgid, "signalled")
    assert found.site == "waits:signalled_caller"
    assert "waits:signalled_thread" in found.stack[found.stack.index(found.site) :]


def test_a_condition_variable_of_newer_glibc_begins_eight_bytes_later(tmp_path: Path) -> None:
    """A newer glibc is recognised by a function that this glibc does not have; the linker adds it here."""
    way = (*COMPILED["static"], "-Wl,--defsym,sched_setattr=main")
    with running(compiled(tmp_path, "waits", way)) as tgid:
        assert named(UserNames(), tgid, "incond").lock == "waits:large+0x108"
        assert named(UserNames(), tgid, "wait").lock == "waits:cond"
        assert named(UserNames(), tgid, "inrw").lock == "waits:large+0xc8"


@pytest.mark.parametrize("has_debug_files", [True, False])
def test_callers_of_wrappers_and_of_functions_without_names(has_debug_files: bool, tmp_path: Path) -> None:
    """The program exports its functions that are not static; nothing else in it has a name."""
    way = ("gcc", "-O2", "-pthread", "-rdynamic", "-s")
    program = compiled(tmp_path, "wrappers", way, "user_wrappers.c")
    names = UserNames() if has_debug_files else UserNames(debug_files=os.fsencode(tmp_path / "none"))
    with running(program, stdout=subprocess.DEVNULL) as tgid:
        wrapper = named(names, tgid, "wrapper")
        assert wrapper.site == wrapper.lock == "wrappers:wrapper_caller"
        nameless = named(names, tgid, "nameless")
        caller, _, offset = nameless.site.partition("+")
        assert (caller, nameless.lock) == ("wrappers:nameless_caller", nameless.site)
        assert 0 < int(offset, 16) < 32, "where in it, after the call"
        assert named(names, tgid, "split").site == "wrappers:split_caller"
        for comm in ("puts", "fflush"):
            found = named(names, tgid, comm)
            assert (found.lock, found.kind) == ("libc.so.6:stdio", "lock"), found
            assert found.site == f"wrappers:{comm}_caller"


def test_cpp(tmp_path: Path) -> None:
    for level in ("-O2", "-O0"):
        program = compiled(tmp_path, "shop", ("g++", "-std=c++20", level, "-pthread"), "user_waits.cc")
        names = UserNames()
        with running(program) as tgid:
            for comm, (lock, kind, family) in CPP.items():
                found = named(names, tgid, comm)
                assert found.site.endswith(f"::{comm}_caller"), (comm, found)
                assert (found.lock, found.kind) == (f"shop{lock}" if lock else found.site, kind), (
                    comm,
                    found,
                )
                assert family in (None, found.family), (comm, found)


def test_a_stripped_program_has_offsets_of_its_functions(tmp_path: Path) -> None:
    program = compiled(tmp_path, "stripped", COMPILED["plain"])
    symbols = subprocess.run(["nm", str(program)], check=True, capture_output=True, text=True).stdout
    at = {
        name: int(value, 16)
        for value, _, name in (line.rsplit(" ", 2) for line in symbols.splitlines() if line[0] != " ")
    }
    subprocess.run(["strip", str(program)], check=True)
    names = UserNames()
    with running(program) as tgid:
        for comm, variable in (("global", "global_mutex"), ("read", "rwlock"), ("wait", "cond")):
            found = named(names, tgid, comm)
            assert found.site == f"stripped+{at[comm + '_caller']:#x}"
            assert found.lock == f"stripped+{at[variable]:#x}"
        assert named(names, tgid, "wait").kind == "cond"


def test_debug_files(tmp_path: Path) -> None:
    """The symbols are in a file beside the program, which is told by a checksum if there is no build id."""
    for build_id in ("sha1", "none"):
        program = compiled(tmp_path, f"linked-{build_id}", (*COMPILED["plain"], f"-Wl,--build-id={build_id}"))
        debug = program.with_suffix(".debug")
        subprocess.run(["objcopy", "--only-keep-debug", program, debug], check=True)
        subprocess.run(["objcopy", "--strip-all", f"--add-gnu-debuglink={debug}", program], check=True)
        with running(program) as tgid:
            assert named(UserNames(), tgid, "file").lock == f"{program.name}:static_mutex"
            assert named(UserNames(), tgid, "file").site == f"{program.name}:file_caller"
            with debug.open("ab") as file:  # without a build id, the file no longer belongs to the program
                file.write(b"more")
            assert named(UserNames(), tgid, "file").lock.startswith(f"{program.name}:") == (
                build_id == "sha1"
            )


FORGED = "pthread_cond_wait"
"""The name that a forged debug file gives to a function, so that threads in it seem to wait for work."""
OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: has root directories and files of others")


def stripped_and_forged(tmp: Path, *options: str) -> tuple[Path, Path]:
    """Compile a program without symbols, and a debug file that fits it and has a false name in it."""
    program, forged = compiled(tmp, "shop", (*COMPILED["static"], *options)), tmp / "shop.debug"
    rename = f"--redefine-sym=file_caller={FORGED}"
    subprocess.run(["objcopy", "--only-keep-debug", rename, program, forged], check=True)
    subprocess.run(["objcopy", "--strip-all", f"--add-gnu-debuglink={forged}", program], check=True)
    return program, forged


@as_root
@pytest.mark.parametrize("way", ["chroot", "mount"])
def test_debug_files_of_another_root_name_the_programs_of_that_root_alone(way: str, tmp_path: Path) -> None:
    """Any user can have a root directory of their own, or other mounts in the same one, and build ids are
    public. A program of the host that is run there must not get other names in its real processes."""
    program, forged = stripped_and_forged(tmp_path, "-Wl,--build-id=0xabcdef12")
    jail, place = tmp_path / "jail", tmp_path / "debug"
    for directory in (jail / f".{place}", place):
        (directory / ".build-id/ab").mkdir(parents=True)
    shutil.move(forged, jail / f".{place}/.build-id/ab/cdef12.debug")
    os.link(program, jail / "shop")
    bind = f"mount --bind {jail}{place} {place} && exec {program}"
    command = {"chroot": ["chroot", jail, "/shop"], "mount": ["unshare", "-m", "sh", "-c", bind]}[way]
    names = UserNames(debug_files=os.fsencode(place))
    with running(*command) as attacker, running(program) as tgid:
        theirs, ours = named(names, attacker, "file"), named(names, tgid, "file")
        assert (FORGED in str(theirs.stack)) == (way == "chroot")
        assert FORGED not in str(ours.stack)


@as_root
def test_debug_files_of_another_user_name_no_program(tmp_path: Path) -> None:
    """A user may have a program of root's beside files of their own, by a link or by a mount."""
    program, forged = stripped_and_forged(tmp_path, "-Wl,--build-id=none")
    with running(program) as tgid:
        assert FORGED in str(named(UserNames(), tgid, "file").stack)
        os.chown(forged, OTHER_USER, OTHER_USER)
        assert FORGED not in str(named(UserNames(), tgid, "file").stack)
        os.chown(program, OTHER_USER, OTHER_USER)
        assert FORGED in str(named(UserNames(), tgid, "file").stack)


def test_a_deleted_and_a_replaced_program(tmp_path: Path) -> None:
    program = compiled(tmp_path, "deleted", COMPILED["plain"])
    with running(program) as tgid:
        blocked_thread(tgid, "global")
        program.unlink()
        assert named(UserNames(), tgid, "global").lock == "deleted:global_mutex"
        shutil.copy("/bin/true", program)
        assert named(UserNames(), tgid, "global").lock == "deleted:global_mutex"


LIBRARY = """
#include <pthread.h>
pthread_mutex_t registry_mutex = PTHREAD_MUTEX_INITIALIZER;
void enter_registry(void) { pthread_mutex_lock(&registry_mutex); __asm__ volatile(""); }
"""
USER = """
#define _GNU_SOURCE
#include <pthread.h>
void enter_registry(void);
int main(void) { enter_registry(); pthread_setname_np(pthread_self(), "library"); enter_registry(); }
"""
NAME_IT = """
import sys
from tests.support.ptraced import blocked_capture
from lockd.names.locks.user_locks import UserNames
tgid = int(sys.argv[1])
tid, address, capture = blocked_capture(tgid, "library")
found = UserNames().name_lock(tgid, tid, address, "other", capture)
print(found.lock, found.kind, found.site)
"""


@pytest.mark.parametrize("dropped", ["-sys_resource", "-sys_admin,-checkpoint_restore"])
def test_a_library_that_was_deleted(dropped: str, tmp_path: Path) -> None:
    """With the right to open mapped files, the library is read from its mapping; without it, from the memory
    of the process."""
    (tmp_path / "library.c").write_text(LIBRARY)
    (tmp_path / "user.c").write_text(USER)
    library = tmp_path / "libshop.so.1"
    for made, *sources in (
        (library, "-shared", "-fPIC", tmp_path / "library.c"),
        (tmp_path / "user", tmp_path / "user.c", library),
    ):
        subprocess.run(["gcc", "-O2", *sources, f"-Wl,-rpath,{tmp_path}", "-o", made], check=True)
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    with running(tmp_path / "user") as tgid:
        blocked_thread(tgid, "library")
        library.unlink()
        done = subprocess.run(
            ["setpriv", "--bounding-set", dropped, sys.executable, "-c", NAME_IT, str(tgid)],
            env=environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
    assert done.stdout.split() == ["libshop.so.1:registry_mutex", "lock", "libshop.so.1:enter_registry"]


FORGER = r"""
#define _GNU_SOURCE
#include <link.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
void enter_registry(void);
static int forge(struct dl_phdr_info *object, size_t size, void *data) {
    for (int i = 0; strstr(object->dlpi_name, "libshop") && i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || part->p_flags != PF_R) continue;
        char *name = memmem((char *)object->dlpi_addr + part->p_vaddr, part->p_filesz, "registry_mutex", 14);
        if (!name) continue;
        mprotect((void *)((unsigned long)name & -4096), 4096, PROT_READ | PROT_WRITE);
        *name = 'f';
    }
    return 0;
}
int main(void) {
    enter_registry();
    dl_iterate_phdr(forge, 0);
    pthread_setname_np(pthread_self(), "library");
    enter_registry();
}
"""
OTHERS = "".join(f"void other_{number}(void) {{ }}\n" for number in range(300))
"""The code of so many functions that their names lie behind the first page of a library."""
NAME_ALL = """
import sys
from tests.support.ptraced import blocked_capture
from lockd.names.locks.user_locks import UserNames
names = UserNames()
for tgid in map(int, sys.argv[1:]):
    tid, address, capture = blocked_capture(tgid, "library")
    print(names.name_lock(tgid, tid, address, "other", capture).lock, len(names._objects._files))
"""


def test_what_a_process_changed_in_its_copy_of_a_library_names_its_own_locks_alone(tmp_path: Path) -> None:
    """A deleted library is read from the memory of processes. Processes that have not changed it share one
    object."""
    (tmp_path / "library.c").write_text(LIBRARY + OTHERS)
    (tmp_path / "user.c").write_text(USER)
    (tmp_path / "forger.c").write_text(FORGER)
    library = tmp_path / "libshop.so.1"
    for made, *sources in (
        (library, "-shared", "-fPIC", tmp_path / "library.c"),
        (tmp_path / "user", tmp_path / "user.c", library),
        (tmp_path / "forger", tmp_path / "forger.c", library),
    ):
        subprocess.run(["gcc", "-O2", *sources, f"-Wl,-rpath,{tmp_path}", "-o", made], check=True)
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    user = tmp_path / "user"
    with running(tmp_path / "forger") as forger, running(user) as first, running(user) as second:
        tgids = forger, first, second
        for tgid in tgids:
            blocked_thread(tgid, "library")
        library.unlink()
        dropped = "-sys_admin,-checkpoint_restore"
        done = subprocess.run(
            ["setpriv", "--bounding-set", dropped, sys.executable, "-c", NAME_ALL, *map(str, tgids)],
            env=environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
    (forged, _), (real, before), (again, after) = map(str.split, done.stdout.splitlines())
    assert forged == "libshop.so.1:fegistry_mutex"
    assert real == again == "libshop.so.1:registry_mutex"
    assert before == after, "the two that are alike have one object"


def test_a_process_in_a_mount_namespace_of_its_own(tmp_path: Path) -> None:
    """Outside of the namespace, the path of its program leads to another file, or to none."""
    program = compiled(tmp_path, "hidden", COMPILED["static"])
    place = tmp_path / "place"
    place.mkdir()
    script = f"mount -t tmpfs none {place} && cp {program} {place}/waits && exec {place}/waits"
    with running("unshare", "-m", "sh", "-c", script) as tgid:
        found = named(UserNames(), tgid, "global")
        assert not list(place.iterdir())
    assert (found.lock, found.site) == ("waits:global_mutex", "waits:global_caller")


def test_a_process_that_ended_has_what_was_seen(tmp_path: Path) -> None:
    program = compiled(tmp_path, "ended", COMPILED["plain"])
    names = UserNames()
    with running(program) as tgid:
        tid, address, capture = blocked_capture(tgid, "global")
        names.read_mappings(tgid)
    assert not Path(f"/proc/{tgid}").exists()
    found = names.name_lock(tgid, tid, address, "other", capture)
    assert (found.lock, found.kind, found.site) == ("ended:global_mutex", "lock", "ended:global_caller")
    names.keep(set())
    gone = names.name_lock(tgid, tid, address, "cond", capture)
    assert (gone.lock, gone.kind, gone.site) == ("anon", "cond", "")


def named_as(names: UserNames, tgid: int, comm: str, family: str) -> UserLock:
    """Return the lock of a thread of CPython, once the thread waits for a lock of this family.

    The thread waits for the GIL again and again, also on its way to another lock. If such a wait ends while
    it is read, the answer is provisional, and the daemon captures another wait.
    """
    until = time.monotonic() + 60
    while (found := named(names, tgid, comm)).family != family and time.monotonic() < until:
        assert found.is_provisional or found.family == "gil", found
    return found


PYTHON = """
import ctypes, threading
def run(name, function):
    ctypes.CDLL(None).prctl(15, name)
    function()
lock = threading.Lock()
lock.acquire()
threading.Thread(target=run, args=(b"acquires", lock.acquire)).start()
def spin():
    while True: pass
for _ in range(4):
    threading.Thread(target=run, args=(b"spins", spin)).start()
"""


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="host: no Python of the distribution")
def test_cpython() -> None:
    """CPython's GIL is a condition variable, and its threading.Lock is a semaphore."""
    names = UserNames()
    with running("/usr/bin/python3", "-c", PYTHON) as tgid:
        spins = named_as(names, tgid, "spins", "gil")
        acquires = named_as(names, tgid, "acquires", "thread_lock")
    assert (acquires.kind, acquires.family) == ("lock", "thread_lock")
    assert (spins.kind, spins.family) == ("lock", "gil")
    assert spins.lock.startswith("python3")
    assert spins.lock.endswith(":GIL")


@pytest.mark.parametrize("owner", [0, 12345])
def test_the_map_of_a_compiler_at_run_time(owner: int, tmp_path: Path) -> None:
    """Code in memory without a file calls a C function. The perf map has its name, if it can be believed.

    The namer has looked at the process a moment before there was such code.
    """
    program = compiled(tmp_path, "jitted", ("gcc", "-O2", "-pthread"), "user_jit.c")
    names = UserNames()
    child = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    perf_map = Path(f"/tmp/perf-{child.pid}.map")
    try:
        assert child.stdin and child.stdout
        start = int(child.stdout.readline(), 16)
        names.read_mappings(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        perf_map.write_text(f"{start - 64:x} 40 before\n{start:x} 40 LShop;::checkout and more.part\n")
        os.chown(perf_map, owner, owner)
        tid, address, capture = blocked_capture(child.pid, "jit")
        sampled = [frame.label for _, frame in names.stack(child.pid, capture, 32).frames]
        found = names.name_lock(child.pid, tid, address, "other", capture)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
        perf_map.unlink(missing_ok=True)
    assert "jitted:run" in sampled
    if owner:
        assert "[jit]" in found.stack
        assert found.site == "jitted:run"
    else:
        assert found.site == "[jit]:LShop;::checkout and more.part"
        assert "jitted:run" in found.stack
    assert found.lock == "jitted:mutex"


def test_this_process_itself() -> None:
    """A lock in a variable of the C library of this process has a name, and one in its heap has none."""
    stderr = ctypes.c_void_p.in_dll(ctypes.CDLL("libc.so.6"), "_IO_2_1_stderr_")
    names = UserNames()
    found = names.name_lock(os.getpid(), os.getpid(), ctypes.addressof(stderr) + 8, "other", None)
    assert (found.lock, found.kind) == ("libc.so.6:_IO_2_1_stderr_+0x8", "other")
    buffer = ctypes.create_string_buffer(10_000_000)
    assert (
        names.name_lock(os.getpid(), os.getpid(), ctypes.addressof(buffer) + 5_000_000, "other", None).lock
        == "anon"
    )


def test_files_that_are_no_elf_delay_and_break_nothing(tmp_path: Path) -> None:
    """A process has mapped a text file, and a file that is cut short while it is mapped."""
    script = (
        "import mmap, sys, time\n"
        "files = [open(path, 'r+b') for path in sys.argv[1:]]\n"
        "maps = [mmap.mmap(file.fileno(), 0) for file in files]\n"
        "files[1].truncate(100)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    text, cut = tmp_path / "text", tmp_path / "cut"
    text.write_bytes(b"text" * 10_000)
    shutil.copy("/bin/true", cut)
    child = subprocess.Popen([sys.executable, "-c", script, text, cut], stdout=subprocess.PIPE)
    try:
        assert child.stdout
        assert child.stdout.readline() == b"ready\n"
        lines = Path(f"/proc/{child.pid}/maps").read_text().splitlines()
        names = UserNames()
        for name in ("text", "cut"):
            start = next(int(line.split("-")[0], 16) for line in lines if line.endswith(f"/{name}"))
            assert names.name_lock(child.pid, child.pid, start + 0x40, "other", None).lock == f"{name}+0x40"
    finally:
        child.kill()
        child.communicate()
