"""Kernel symbols: the functions of a stack, static locks, and the site of a lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockd.names.kernel.kallsyms import KernelSymbols

TEXT = """\
ffffffff81000000 T _stext
ffffffff81001000 T vfs_read
ffffffff81002000 t pipe_write
ffffffff81003000 T mutex_lock
ffffffff81003100 t __mutex_lock.constprop.0
ffffffff81003200 T down_read
ffffffff81003300 t rwsem_down_read_slowpath
ffffffff81003400 T _raw_spin_lock
ffffffff81003500 T native_queued_spin_lock_slowpath
ffffffff81003600 t __traceiter_contention_begin
ffffffff81003680 t .slowpath
ffffffff81003700 T bpf_trace_run2
ffffffff81003780 t ftrace_trampoline	[__builtin__ftrace]
ffffffff810037a0 T arch_rethook_trampoline
ffffffff81003800 T downgrade_things
ffffffff81003900 T lockup_detector
ffffffff81003a00 T lock_rename
ffffffff81003b00 T rtnl_lock
ffffffff81003c00 T perf_event_ctx_lock_nested
ffffffff81003d00 T trace_array_put
ffffffff81003e00 T schedule_on_each_cpu
ffffffff81003e10 T try_to_wake_up
ffffffff81003e20 T wake_up_q
ffffffff81003e30 T wake_up_process
ffffffff81003e40 T rcuwait_wake_up
ffffffff81003e50 t percpu_rwsem_wake_function
ffffffff81003e60 t __wake_up_common
ffffffff81003e70 T percpu_up_write
ffffffff81003e80 T __percpu_down_read
ffffffff81003e90 t __mutex_unlock_slowpath.isra.0
ffffffff81003ea0 T mutex_unlock
ffffffff81003eb0 t rwsem_wake.isra.0
ffffffff81003ec0 T up_read
ffffffff81003ed0 t rwsem_downgrade_wake
ffffffff81003ee0 T downgrade_write
ffffffff81003ef0 t rwsem_down_write_slowpath
ffffffff81003f00 T down_write_killable
ffffffff81003f10 t __up
ffffffff81003f20 T up
ffffffff81003f30 T rtnl_unlock
ffffffff81003f40 T netdev_run_todo
ffffffff81003f50 T signal_wake_up_state
ffffffff81003f60 t process_timeout
ffffffff81003f70 T asm_sysvec_apic_timer_interrupt
ffffffff81003f80 t __traceiter_sched_waking
ffffffff81003f90 T mutex_lock_of_shop
ffffffff81003fa0 t fred_extint
ffffffff81003fb0 T common_interrupt
ffffffff81003fc0 T asm_fred_entrypoint_kernel
ffffffff81003fd0 T asm_fred_entrypoint_user
ffffffff81004000 t do_work.isra.0.cold
ffffffff81004100 W weak_function
ffffffff82000000 D init_task
ffffffff82000100 d tasklist_lock
ffffffff82000200 B big_table
ffffffff82000300 R constant
ffffffff90000000 b far_away
ffffffffc0000000 t module_function\t[nfs]
ffffffffc0100000 t bpf_prog_0123456789abcdef_on_contention_begin\t[bpf]
ffffffffc0100400 t bpf_trampoline_6442461234\t[bpf]
ffffffffc0100800 t bpf_trampoline_16460_5\t[bpf]
"""
MODULES = "nfs 65536 0 - Live 0xffffffffc0000000\nhidden 4096 0 - Live 0x0000000000000000\n"


@pytest.fixture
def symbols(tmp_path: Path) -> KernelSymbols:
    path = tmp_path / "kallsyms"
    path.write_text("".join(sorted(TEXT.splitlines(keepends=True), reverse=True)))
    modules = tmp_path / "modules"
    modules.write_text(MODULES)
    return KernelSymbols(path, modules)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (0xFFFFFFFF81001000, "vfs_read"),
        (0xFFFFFFFF81001FFF, "vfs_read"),
        (0xFFFFFFFF81002010, "pipe_write"),
        (0xFFFFFFFF81003110, "__mutex_lock"),
        (0xFFFFFFFF81004010, "do_work"),
        (0xFFFFFFFF81004110, "weak_function"),
        (0xFFFFFFFFC0000010, "module_function"),
        (0xFFFFFFFFC0010000, ""),  # behind the module, but before any other symbol
        (0xFFFFFFFF82000000, ""),  # data
        (0xFFFFFFFF80000000, ""),  # before everything
        (0, ""),
    ],
)
def test_functions(symbols: KernelSymbols, address: int, name: str) -> None:
    assert symbols.function(address) == name


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (0xFFFFFFFF82000100, "tasklist_lock"),
        (0xFFFFFFFF82000110, "tasklist_lock+0x10"),
        (0xFFFFFFFF82000200, "big_table"),
        (0xFFFFFFFF82000300, "constant"),
        (0xFFFFFFFF82000300 + 65537, ""),  # too far from any variable: memory that was allocated
        (0xFFFFFFFF81001000, ""),  # a function
        (0xFFFF888000000000, ""),  # the heap
        (0, ""),
    ],
)
def test_variables(symbols: KernelSymbols, address: int, name: str) -> None:
    assert symbols.variable(address) == name


@pytest.mark.parametrize(
    ("address", "gap"),
    [
        (0xFFFFFFFF82000300 + 65537, (0xFFFFFFFF82010300, 0xFFFFFFFF8FFFFFFF)),
        (0xFFFFFFFF81001010, (0xFFFFFFFF81001000, 0xFFFFFFFF81001FFF)),
        (0xFFFF888000000000, (0, 0xFFFFFFFF80FFFFFF)),
        (0xFFFFFFFFFFFFFFFF, (0xFFFFFFFFC0100800, 0xFFFFFFFFFFFFFFFF)),
    ],
)
def test_gaps_between_variables(symbols: KernelSymbols, address: int, gap: tuple[int, int]) -> None:
    assert symbols.gap(address) == gap
    first, last = gap
    assert not any(map(symbols.variable, (first, address, (first + last) // 2, last)))


@pytest.mark.parametrize(
    ("stack", "site"),
    [
        (("bpf_trace_run2", "__traceiter_contention_begin", "__mutex_lock", "pipe_write"), "pipe_write"),
        (("rwsem_down_read_slowpath", "down_read", "vfs_read"), "vfs_read"),
        (("native_queued_spin_lock_slowpath", "_raw_spin_lock", "do_work"), "do_work"),
        (("mutex_lock", "downgrade_things", "vfs_read"), "downgrade_things"),
        (("mutex_lock", "lockup_detector"), "lockup_detector"),
        ((".slowpath", "_raw_spin_lock", "do_work"), "do_work"),
        (("mutex_lock", "lock_rename", "vfs_read"), "lock_rename"),
        (("mutex_lock", "perf_event_ctx_lock_nested", "vfs_read"), "perf_event_ctx_lock_nested"),
        (("mutex_lock", "trace_array_put", "vfs_read"), "trace_array_put"),
        (("mutex_lock", "schedule_on_each_cpu"), "schedule_on_each_cpu"),
        (("mutex_lock", "rtnl_lock", "do_work"), "do_work"),
        (("mutex_lock", "rtnl_lock"), "rtnl_lock"),
        (("bpf_prog_0123456789abcdef_on_contention_begin", "bpf_trampoline_6442461234", "mutex_lock",
          "bpf_trampoline_6442461234", "vfs_read"), "vfs_read"),
        (("bpf_trampoline_16460_5", "rwsem_down_read_slowpath", "vfs_read"), "vfs_read"),
        (("mutex_lock",), ""),
        ((), ""),
    ],
)  # fmt: skip
def test_the_site_is_the_first_function_that_is_not_locking(
    symbols: KernelSymbols, stack: tuple[str, ...], site: str
) -> None:
    addresses = tuple(address_of(name) + 4 for name in stack)
    assert symbols.site(addresses) == site
    assert symbols.site((0xFFFF888000000000, *addresses)) == site  # one frame without a name


@pytest.mark.parametrize(
    ("stack", "site", "first"),
    [
        (("wake_up_q", "__mutex_unlock_slowpath", "mutex_unlock", "pipe_write", "vfs_read"), "pipe_write",
         "__mutex_unlock_slowpath"),
        (("wake_up_q", "__mutex_unlock_slowpath", "pipe_write"), "pipe_write", "__mutex_unlock_slowpath"),
        (("wake_up_q", "rwsem_wake", "up_read", "do_work"), "do_work", "rwsem_wake"),
        (("wake_up_q", "rwsem_wake", "up_read", "bpf_trampoline_16460_5", "do_work"), "do_work",
         "rwsem_wake"),
        (("wake_up_q", "rwsem_downgrade_wake", "downgrade_write", "do_work"), "do_work",
         "rwsem_downgrade_wake"),
        (("wake_up_process", "__up", "up", "do_work"), "do_work", "__up"),
        (("wake_up_process", "percpu_rwsem_wake_function", "__wake_up_common", "percpu_up_write", "do_work"),
         "do_work", "percpu_up_write"),
        (("wake_up_process", "rcuwait_wake_up", "vfs_read"), "vfs_read", "vfs_read"),
        (("wake_up_q", "mutex_unlock", "netdev_run_todo", "rtnl_unlock", "do_work"), "do_work",
         "mutex_unlock"),
        (("wake_up_q", "mutex_unlock", "rtnl_unlock"), "rtnl_unlock", "mutex_unlock"),
        (("wake_up_q", "mutex_unlock"), "", "mutex_unlock"),
        (("wake_up_q", "mutex_unlock", "do_work", "asm_fred_entrypoint_user"), "do_work", "mutex_unlock"),
    ],
)  # fmt: skip
def test_the_site_of_a_release_is_behind_the_wake_up_and_the_locking(
    symbols: KernelSymbols, stack: tuple[str, ...], site: str, first: str
) -> None:
    found = symbols.release(woken_by(stack))
    assert found
    assert found[0] == site
    assert found[1][0] == first


@pytest.mark.parametrize(
    "stack",
    [
        ("signal_wake_up_state", "vfs_read"),
        ("process_timeout", "asm_sysvec_apic_timer_interrupt", "mutex_unlock", "do_work"),
        ("wake_up_process", "__up", "up", "do_work", "asm_sysvec_apic_timer_interrupt", "vfs_read"),
        ("wake_up_process", "__up", "up", "do_work", "fred_extint", "asm_fred_entrypoint_kernel", "vfs_read"),
        ("wake_up_q", "mutex_unlock", "do_work", "common_interrupt", "asm_fred_entrypoint_kernel"),
        ("wake_up_q", "rwsem_down_write_slowpath", "down_write_killable", "do_work"),
        ("wake_up_q", "rwsem_down_read_slowpath", "down_read", "do_work"),
        ("wake_up_process", "rcuwait_wake_up", "__percpu_down_read", "vfs_read"),
        ("wake_up_process", "do_work"),
        ("wake_up_q",),
    ],
)
def test_another_wake_up_is_no_release(symbols: KernelSymbols, stack: tuple[str, ...]) -> None:
    assert symbols.release(woken_by(stack)) is None


def test_of_a_release_without_names_nothing_is_known(symbols: KernelSymbols) -> None:
    assert symbols.release((0xFFFF888000000000,)) == symbols.release(()) == ("", ())


def woken_by(stack: tuple[str, ...]) -> tuple[int, ...]:
    """Return the stack of a thread that wakes another one, as the programs see it."""
    traced = ("bpf_prog_0123456789abcdef_on_contention_begin", "bpf_trace_run2", "__traceiter_sched_waking")
    return tuple(address_of(name) + 4 for name in (*traced, "try_to_wake_up", *stack))


def test_a_stack_is_shown_without_the_tracing(symbols: KernelSymbols) -> None:
    stack = [
        address_of(name)
        for name in ("bpf_trace_run2", "ftrace_trampoline", "__traceiter_contention_begin", "mutex_lock")
    ] + [address_of("arch_rethook_trampoline"), address_of("vfs_read")]
    assert symbols.describe(tuple(stack)) == ("mutex_lock", "arch_rethook_trampoline", "vfs_read")
    assert symbols.site(tuple(stack)) == "vfs_read"
    assert symbols.describe((address_of("vfs_read"), 0xFFFF888000000000)) == (
        "vfs_read",
        "0xffff888000000000",
    )
    assert len(symbols.describe((address_of("vfs_read"),) * 40)) == 16
    assert symbols.describe(()) == ()


def test_hidden_addresses_are_nobodys(tmp_path: Path) -> None:
    """With kptr_restrict the kernel shows every symbol at address 0."""
    path = tmp_path / "kallsyms"
    path.write_text("".join(f"{0:016x} T {line.split()[2]}\n" for line in TEXT.splitlines()))
    symbols = KernelSymbols(path, tmp_path / "none")
    assert symbols.function(0xFFFFFFFF81001000) == ""
    assert symbols.variable(0xFFFFFFFF82000100) == ""
    assert symbols.site((0xFFFFFFFF81001000,)) == ""


def test_without_kallsyms_all_no_lock_is_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "kallsyms"
    path.write_text("ffffffff81000000 T _stext\nffffffff82000000 D __per_cpu_start\n")
    assert KernelSymbols(path, tmp_path / "none").variable(0xFFFFFFFF82000100) == ""


def test_an_empty_file_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "kallsyms"
    path.write_text("")
    assert KernelSymbols(path, tmp_path / "none").function(0xFFFFFFFF81001000) == ""


def address_of(name: str) -> int:
    for line in TEXT.splitlines():
        fields = line.split()
        if name in (fields[2], fields[2].split(".")[0]):
            return int(fields[0], 16)
    raise KeyError(name)


def test_who_asked_for_a_lock_includes_those_who_do_it_for_others(symbols: KernelSymbols) -> None:
    stack = tuple(address_of(name) + 4 for name in ("__mutex_lock", "mutex_lock", "rtnl_lock", "vfs_read"))
    assert symbols.callers(stack) == ("rtnl_lock", "vfs_read")
    assert symbols.site(stack) == "vfs_read"


@pytest.mark.parametrize(
    ("address", "place"),
    [
        (0xFFFFFFFF81001000, "vfs_read+0x0"),
        (0xFFFFFFFF8100101F, "vfs_read+0x1f"),
        (0xFFFFFFFF81003110, "__mutex_lock+0x10"),
        (0xFFFFFFFFC0000010, "module_function+0x10 [nfs]"),
        (0xFFFFFFFFC0010000, "0xffffffffc0010000"),
        (0xFFFFFFFF82000000, "0xffffffff82000000"),
    ],
)
def test_places_in_functions_and_their_modules(symbols: KernelSymbols, address: int, place: str) -> None:
    assert symbols.place(address) == place
