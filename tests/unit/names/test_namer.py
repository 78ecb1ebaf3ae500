"""What the namer remembers of processes that blocked, and for how long."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockd.names.locks import user_locks
from lockd.names.locks.user_locks import MOST_RENAMED_SECONDS, WEIGHED_EVERY, UserNames
from lockd.names.objects.address_space import AddressSpace
from lockd.names.objects.jit import PATIENCE_SECONDS, JitNames
from lockd.names.objects.object_cache import ObjectCache
from lockd.names.protocol import (
    MOST_FUNCTIONS,
    NOT_READ,
    GoWaits,
    GoWaitsAnswer,
    LockAnswer,
    OwnedLock,
    Owners,
    OwnersAnswer,
    StackAnswer,
    ThreadCaptured,
    UserLockSeen,
    Watch,
)
from lockd.names.runtimes.hotspot import HotSpot
from lockd.names.server import ASKED_SECONDS, Names
from lockd.names.shares import NOBODY, Shares
from lockd.names.stacks import StackNames
from lockd.names.unwind.capture import Capture
from tests.needs import needs
from tests.support.ptraced import blocked_capture

FIRST, SECOND = 100, 200
MAPS = "400000-401000 r-xp 00000000 08:01 7 /bin/waiter\n401000-402000 rw-p 00001000 08:01 7 /bin/waiter\n"
LOCK = 0x401100
COMPILER = Path(__file__).with_name("user_jit.c")
KERNEL = (
    "bpf_trace_run2", "schedule", "__schedule", "vfs_read", "entry_SYSCALL_64_after_hwframe",
    "asm_exc_page_fault", "asm_exc_nmi", "asm_sysvec_apic_timer_interrupt", "asm_common_interrupt",
    "el0t_64_sync", "el1h_64_irq", "fred_extint", "common_interrupt", "do_syscall_64",
    "asm_fred_entrypoint_user", "asm_fred_entrypoint_kernel",
)  # fmt: skip
"""Functions of a kernel, 256 bytes each."""
AT = {name: 0xFFFFFFFF81000000 + 0x100 * number for number, name in enumerate(KERNEL)}
FRAMES = Capture((), b"", tuple(range(0x400000, 0x400000 + 2 * MOST_FUNCTIONS)), 0)
"""A capture on a machine whose registers are not known: it has only the frames that the kernel found."""


class Host:
    """The names that a namer knows, with a procfs and a clock of its own."""

    def __init__(self, procfs: Path) -> None:
        self._procfs = procfs
        self._now = 1000.0
        self._shares = Shares(procfs, 1.0)
        self.names = Names(procfs, self._shares, lambda: self._now)

    def owes(self, tgid: int) -> None:
        """Have a process owe the namer more time than it may take."""
        self._shares._charge((tgid, NOBODY), 1000.0)

    def blocks_and_ends(self, tgid: int) -> None:
        directory = self._procfs / str(tgid)
        directory.mkdir()
        (directory / "maps").write_text(MAPS)
        self.names.note_blocked([tgid])
        shutil.rmtree(directory)

    def wait(self, seconds: float) -> None:
        self._now += seconds

    def lock_of(self, tgid: int) -> str:
        answer = self.names.answer(UserLockSeen(1, tgid, tgid, LOCK, "lock"))
        assert isinstance(answer, LockAnswer)
        return answer.lock


def test_a_process_that_ended_is_still_known(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    assert host.lock_of(FIRST) == "waiter+0x1100"


def test_it_is_known_while_others_are_spoken_of(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.names.answer(Watch((SECOND,), (300,)))
    host.wait(ASKED_SECONDS / 2)
    host.blocks_and_ends(SECOND)
    assert host.lock_of(FIRST) == "waiter+0x1100"


def test_it_is_forgotten_if_nobody_asks(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.wait(ASKED_SECONDS)
    host.blocks_and_ends(SECOND)
    assert host.lock_of(FIRST) == "anon"


def test_what_the_sampler_speaks_of_is_known_until_it_says_otherwise(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.names.answer(Watch((FIRST,), ()))
    host.wait(ASKED_SECONDS)
    host.blocks_and_ends(SECOND)
    assert host.lock_of(FIRST) == "waiter+0x1100"
    host.names.answer(Watch((), (FIRST,)))
    assert host.lock_of(FIRST) == "anon"


def test_a_process_with_the_id_of_one_that_ended_is_another(tmp_path: Path) -> None:
    """What was found out once about the process that ended, such as its start, is wrong for the new one."""
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.names.answer(Watch((FIRST,), ()))
    host.blocks_and_ends(FIRST)
    before = host.names._user._processes[FIRST]
    host.names.answer(Watch((FIRST,), (FIRST,)))
    assert host.names._user._processes[FIRST] is not before
    host.wait(ASKED_SECONDS)
    host.blocks_and_ends(SECOND)
    assert FIRST in host.names._user._processes, "the sampler wants it to be remembered"


def test_what_it_remembers_has_a_bound_that_is_not_looked_at_for_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The amount of memory is a sum over thousands of processes."""
    most, weighed = 50 * len(MAPS), 0

    def memory(process: Any) -> int:
        nonlocal weighed
        weighed += 1
        return int(process.space.memory)

    monkeypatch.setattr(user_locks, "MAX_PROCESS_BYTES", most)
    monkeypatch.setattr(user_locks._Process, "memory", property(memory))
    host = Host(tmp_path)
    count = 10 * WEIGHED_EVERY
    for tgid in range(FIRST, FIRST + count):
        host.blocks_and_ends(tgid)
    kept = host.names._user._processes
    assert sum(process.space.memory for process in kept.values()) <= most + WEIGHED_EVERY * len(MAPS)
    assert weighed < 4 * count
    assert list(kept)[-1] == FIRST + count - 1
    assert host.lock_of(FIRST + count - 1) == "waiter+0x1100"
    assert host.lock_of(FIRST) == "anon"


def java(directory: Path) -> user_locks._Process:
    return user_locks._Process(directory, AddressSpace(directory, ObjectCache()), JitNames(directory))


def test_locks_of_java_are_named_anew_soon_and_then_more_and_more_rarely(tmp_path: Path) -> None:
    """A perf map may be read while it is being written, and have more in it soon after. It may also change
    all the time."""
    process = java(tmp_path)
    process.note_names(0.0)
    assert process.generation == 0
    renamed = []
    for tenth in range(10_000):
        process.jit.reads += 1
        before = process.generation
        process.note_names(tenth / 10)
        renamed += [tenth / 10] * (process.generation - before)
    assert renamed[:8] == [0, 1, 3, 7, 15, 31, 63, 123]
    assert renamed[-1] - renamed[-2] == MOST_RENAMED_SECONDS


def test_names_that_came_too_soon_are_taken_up_later(tmp_path: Path) -> None:
    process = java(tmp_path)
    process.jit.reads += 1
    process.note_names(10.0)
    process.jit.reads += 1
    process.note_names(10.5)
    assert process.generation == 1
    process.note_names(11.0)
    assert process.generation == 2


def test_of_whom_has_taken_his_share_no_lock_is_looked_at(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.owes(FIRST)
    assert host.lock_of(FIRST) == "anon"
    owners = host.names.answer(Owners(1, (OwnedLock(FIRST, LOCK, "lock", "mutex"),)))
    assert owners == OwnersAnswer(1, (NOT_READ,))
    assert host.names.answer(GoWaits((FIRST,))) == GoWaitsAnswer((FIRST,), (-1,))
    host.blocks_and_ends(SECOND)
    assert host.lock_of(SECOND) == "waiter+0x1100"


def with_symbols(procfs: Path) -> Path:
    (procfs / "kallsyms").write_text("".join(f"{address:016x} T {name}\n" for name, address in AT.items()))
    return procfs


def returns_to(*functions: str) -> tuple[int, ...]:
    """Give return addresses that are in these functions of KERNEL."""
    return tuple(AT[name] + 0x10 for name in functions)


def stack_of(names: Names, question: ThreadCaptured) -> StackAnswer:
    answer = names.answer(question)
    assert isinstance(answer, StackAnswer)
    assert answer.token == question.token
    assert len(answer.user) == len(answer.returns)
    return answer


@pytest.mark.parametrize(
    ("functions", "interrupts"),
    [
        (("schedule", "vfs_read", "entry_SYSCALL_64_after_hwframe"), ()),
        (("schedule", "asm_exc_page_fault"), ()),
        (("vfs_read", "asm_exc_nmi"), ()),
        (("schedule", "el0t_64_sync"), ()),
        (
            ("vfs_read", "asm_sysvec_apic_timer_interrupt", "schedule"),
            ("asm_sysvec_apic_timer_interrupt",),
        ),
        (("vfs_read", "asm_common_interrupt"), ("asm_common_interrupt",)),
        (("vfs_read", "el1h_64_irq", "schedule"), ("el1h_64_irq",)),
        (("vfs_read", "do_syscall_64", "asm_fred_entrypoint_user"), ()),
        (("schedule", "asm_exc_page_fault", "asm_fred_entrypoint_kernel"), ()),
        (("vfs_read", "fred_extint", "asm_fred_entrypoint_kernel", "schedule"), ("fred_extint",)),
        (("vfs_read", "common_interrupt", "asm_fred_entrypoint_user"), ("common_interrupt",)),
    ],
)
def test_a_stack_of_the_kernel_and_whether_an_interrupt_came(
    functions: tuple[str, ...], interrupts: tuple[str, ...], tmp_path: Path
) -> None:
    names = Host(with_symbols(tmp_path)).names
    found = stack_of(names, ThreadCaptured(7, 2, returns_to("bpf_trace_run2", *functions)))
    assert found == StackAnswer(7, (), (), functions, returns_to(*interrupts))


def test_an_interrupt_is_seen_however_deep_the_stack_is(tmp_path: Path) -> None:
    names = Host(with_symbols(tmp_path)).names
    functions = *("vfs_read",) * MOST_FUNCTIONS, "asm_common_interrupt"
    found = stack_of(names, ThreadCaptured(7, 2, returns_to(*functions)))
    assert found == StackAnswer(7, (), (), functions[:MOST_FUNCTIONS], returns_to("asm_common_interrupt"))


def test_a_stack_in_user_space_has_a_bound_too(tmp_path: Path) -> None:
    """The symbols of the kernel are not asked for; there are none here."""
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    found = stack_of(host.names, ThreadCaptured(7, FIRST, (), FRAMES))
    assert found.returns == FRAMES.frames[:MOST_FUNCTIONS]
    assert found.user[:2] == ("waiter+0x0", "waiter+0x0")
    assert (found.kernel, found.interrupts) == ((), ())
    assert set(stack_of(host.names, ThreadCaptured(8, SECOND, (), FRAMES)).user) == {"[unknown]"}


def test_of_whom_has_taken_his_share_the_kernel_is_still_named(tmp_path: Path) -> None:
    host = Host(with_symbols(tmp_path))
    host.blocks_and_ends(FIRST)
    host.owes(FIRST)
    question = ThreadCaptured(7, FIRST, returns_to("schedule", "vfs_read"), FRAMES)
    assert stack_of(host.names, question) == StackAnswer(7, (), (), ("schedule", "vfs_read"), ())


def compiled(output: Path, *arguments: str | Path) -> Path:
    subprocess.run(["gcc", "-O2", "-pthread", *arguments, "-o", output], check=True)
    return output


@contextmanager
def compiling(program: Path) -> Iterator[tuple[int, int, Path]]:
    """Run a process whose thread `jit` waits in code that is compiled at run time.

    Yields the id of the process, the address of that code, and the path of the perf map for its name.
    """
    child = subprocess.Popen([program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    perf_map = Path(f"/tmp/perf-{child.pid}.map")
    try:
        assert child.stdout
        yield child.pid, int(child.stdout.readline(), 16), perf_map
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
        perf_map.unlink(missing_ok=True)


@needs("gcc")
def test_the_stack_of_a_real_thread_is_what_the_tools_show(tmp_path: Path) -> None:
    with_symbols(tmp_path)
    with compiling(compiled(tmp_path / "jitted", COMPILER)) as (tgid, start, perf_map):
        perf_map.write_text(f"{start:x} 40 checkout\n")
        (tmp_path / str(tgid)).symlink_to(f"/proc/{tgid}")
        _, _, capture = blocked_capture(tgid, "jit")
        kernel = returns_to("bpf_trace_run2", "schedule", "vfs_read")
        found = stack_of(Host(tmp_path).names, ThreadCaptured(7, tgid, kernel, capture))
        tools = StackNames(tmp_path)
        assert found.user == tools.user_stack(tgid, capture)
        assert found.kernel == tools.kernel_stack(kernel)
    caller = found.user.index("run")
    assert found.user[caller - 1] == "checkout"
    assert found.returns[0] == capture.registers[16]
    assert start < found.returns[caller - 1] < start + 0x40


def compiled_machine(directory: Path) -> Path:
    """Compile a program like the launcher of a Java machine, whose library has the code of the machine."""
    library = compiled(directory / "libjvm.so", COMPILER, "-shared", "-fPIC", "-Dmain=start_machine")
    source = directory / "launcher.c"
    source.write_text("int start_machine(void);\nint main(void) { return start_machine(); }\n")
    return compiled(directory / "launcher", source, library, f"-Wl,-rpath,{directory}")


@needs("gcc")
def test_a_process_that_became_another_java_machine_is_looked_at_anew(tmp_path: Path) -> None:
    """After an exec the process has the same id and program, but the library is at another address."""
    launcher = compiled_machine(tmp_path)
    names = UserNames()
    with compiling(launcher) as (tgid, _, _):
        tid, address, capture = blocked_capture(tgid, "jit")
        names.name_lock(tgid, tid, address, "other", capture)
        process = names._processes[tgid]
        machine, generation = process.hotspot, process.generation
        assert machine
        process.hotspot = HotSpot(process.directory, machine.library, machine.bias - 0x1000)
        names.name_lock(tgid, tid, address, "other", capture)
        assert process.hotspot.bias == machine.bias
        assert process.generation == generation + 1
        now = process.hotspot
        names.name_lock(tgid, tid, address, "other", capture)
        assert process.hotspot is now


@needs("gcc")
def test_a_java_machine_that_writes_its_map_again_gets_the_new_names(tmp_path: Path) -> None:
    """The new names are there at once, and not only after the seconds for which other names are believed."""
    launcher = compiled_machine(tmp_path)
    names = Names(Path("/proc"), Shares(Path("/proc"), 1.0))
    with compiling(launcher) as (tgid, start, perf_map):
        perf_map.write_text(f"{start:x} 40 before\n")
        _, _, capture = blocked_capture(tgid, "jit")
        assert "before" in stack_of(names, ThreadCaptured(1, tgid, (), capture)).user
        perf_map.write_text(f"{start:x} 40 afterwards\n")
        until = time.monotonic() + PATIENCE_SECONDS / 2
        while "afterwards" not in stack_of(names, ThreadCaptured(2, tgid, (), capture)).user:
            assert time.monotonic() < until
            time.sleep(0.02)
