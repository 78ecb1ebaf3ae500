"""The source of the programs: its constants, and the sizes of its maps."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lockd.errors import HostError
from lockd.load.choose import Choice, choices_for
from lockd.load.hooks import Candidate, parts_of
from lockd.load.host import Host
from lockd.load.settings import LoadSettings, Trace
from lockd.load.source import BPF_DIR, LRU_SIZES, RESERVED_BY_CPU, SIZES, assemble, source_for
from tests.needs import needs

THREADS, CPUS, KEPT_STACKS = 16_384, 64, 65_536
TYPES = SimpleNamespace(
    offset=lambda *_: 0,
    bit_offset=lambda *_: 0,
    has_member=lambda *_: False,
    has_helper=lambda _: False,
    tracepoint_args=lambda _: 3,
)
HOST: Any = SimpleNamespace(types=TYPES, can_cast=False, has_sleeping_rings=False)

PROGRAMS = ("futex", "offcpu", "kernel_locks")
CALLS = LoadSettings(PROGRAMS, 8192, THREADS, 64, 0, 1, "contention", "calls", ())


def compiled(*, with_calls: bool) -> tuple[set[str], set[str]]:
    """Return the files and the macros of the source in mode calls, on a host that can see calls or cannot."""
    choices = [
        Choice(part, part.ways[0] if with_calls or part.what != "calls" else None, (), "")
        for part in parts_of(PROGRAMS, "contention", "calls")
    ]
    text = source_for(CALLS, choices, HOST).text
    files, macros = r'^#line 1 "(\S+)"', r"^#define (\w+)"
    return set(re.findall(files, text, re.MULTILINE)), set(re.findall(macros, text, re.MULTILINE))


def sizes(trace: Trace | None = None) -> dict[str, int]:
    """Return the sizes of maps by their macros on a host that can have CPUS processors."""
    settings = LoadSettings(
        ("futex",), 8192, THREADS, 64, 0, 1, "contention", "blocked", (), trace=trace, cpus=CPUS
    )
    text = source_for(settings, [], HOST).text
    found = re.findall(r"^#define (\w+_ENTRIES) (\w+)", text, re.MULTILINE)
    return {name: int(size, 16) for name, size in found}


def test_constants_are_the_same_on_every_architecture() -> None:
    constants = assemble(["include/arch.bpf.h"], {}).constants
    assert constants["NR_KERNEL"] == -2
    others = {"NR_FUTEX", "NR_CLONE", "NR_EPOLL_WAIT", "NR_EPOLL_PWAIT", "PTHREAD_MUTEX_BYTES"}
    assert not others & constants.keys()


@pytest.mark.parametrize("macro", LRU_SIZES)
def test_what_processors_reserve_of_a_map_leaves_it_as_large_as_it_should_be(macro: str) -> None:
    asked = {**SIZES, "NAMESPACE_IDS_ENTRIES": THREADS // 2, "KEPT_STACKS_ENTRIES": KEPT_STACKS}
    trace = Trace(defines={"KEPT_STACKS_ENTRIES": KEPT_STACKS})
    assert sizes(trace)[macro] == asked[macro] + RESERVED_BY_CPU * CPUS


def test_other_maps_are_not_made_larger() -> None:
    assert "KEPT_STACKS_ENTRIES" not in sizes()
    assert all(sizes()[macro] == size for macro, size in SIZES.items() if macro not in LRU_SIZES)


def test_the_macros_are_those_of_all_such_maps_of_the_daemon_and_of_no_others() -> None:
    of_lru, of_others = set[str](), set[str]()
    for file in [*BPF_DIR.glob("daemon/*.c"), *BPF_DIR.glob("include/*.h")]:
        for kind, macro in re.findall(r'BPF_TABLE\("(\w+)",[^;]*?(\w+)\);', file.read_text()):
            (of_lru if kind == "lru_hash" else of_others).add(macro)
    assert of_lru - {"ENTRIES"} == set(LRU_SIZES)  # ENTRIES: of a trace, and large
    assert not of_others & set(LRU_SIZES)


def test_calls_that_no_hook_shows_are_left_out_and_their_maps_are_not() -> None:
    code, maps = "daemon/futex_calls.bpf.c", {"daemon/captures.bpf.c", "daemon/futex.bpf.c"}
    files, macros = compiled(with_calls=True)
    assert files >= {code, "daemon/sched.bpf.c", *maps} and "FUTEX_CALLS" in macros
    files, macros = compiled(with_calls=False)
    assert files >= {"daemon/sched.bpf.c", *maps} and "WITH_FUTEX" in macros
    assert code not in files and "FUTEX_CALLS" not in macros


def macros(has_member: Callable[[str, str], bool]) -> set[str]:
    """Return the macros of the source for a kernel that has these members of its structs."""
    types = SimpleNamespace(**{**vars(TYPES), "has_member": has_member})
    host: Any = SimpleNamespace(types=types, can_cast=False, has_sleeping_rings=False)
    return set(re.findall(r"^#define (\w+)", source_for(CALLS, [], host).text, re.MULTILINE))


def members_not_of_all_kernels() -> list[tuple[str, str]]:
    """Return each struct and member for which the source asks whether the kernel has it."""
    asked: dict[tuple[str, str], None] = {}

    def has_member(struct: str, member: str) -> bool:
        asked[struct, member] = None
        return True

    macros(has_member)
    return list(asked)


def unguarded(names: set[str]) -> list[str]:
    """Return the lines of the daemon's programs that use one of the macros, and are in no #if about one."""
    found = []
    for file in [*BPF_DIR.glob("daemon/*.c"), *BPF_DIR.glob("include/*.h")]:
        conditions: list[str] = []
        for line in file.read_text().splitlines():
            if line.startswith("#if"):
                conditions.append(line)
            elif line.startswith("#endif"):
                conditions.pop()
            elif names & words(line) and not any(names & words(condition) for condition in conditions):
                found.append(f"{file.name}: {line.strip()}")
    return found


def words(line: str) -> set[str]:
    return set(re.findall(r"\w+", line))


@pytest.mark.parametrize("member", members_not_of_all_kernels(), ids=".".join)
def test_what_a_kernel_may_lack_is_used_only_where_it_is_there(member: tuple[str, str]) -> None:
    missing = macros(lambda *_: True) - macros(lambda *other: other != member)
    assert unguarded(missing) == []


class Complete(Host):
    """A host that has all hooks. Its ring buffers have a lock with these members."""

    can_cast = False

    def __init__(self, members: tuple[str, ...]) -> None:
        def bit_offset(struct: str, path: str) -> int:
            lock, _, member = path.partition(".")
            if struct == "bpf_ringbuf" and (lock != "spinlock" or member not in members):
                raise HostError(f"{struct}.{path}")
            return 0

        types: Any = SimpleNamespace(**{**vars(TYPES), "bit_offset": bit_offset})
        super().__init__(types)

    def resolve(self, candidate: Candidate) -> list[Candidate]:
        return [candidate]

    def obstacle(self, candidate: Candidate) -> str:
        return ""


def uses_of_rings(settings: LoadSettings, host: Host) -> list[str]:
    """Return the lines of the source that make a ring buffer or use one, as the compiler sees them."""
    text = source_for(settings, choices_for(settings, host), host).text
    text = re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)
    compiled = subprocess.run(["gcc", "-E", "-"], input=text, capture_output=True, text=True, check=True)
    return [line.strip() for line in compiled.stdout.splitlines() if "ringbuf_" in line.lower()]


WITHOUT_KERNEL_LOCKS = ("futex", "offcpu")


@needs("gcc")
@pytest.mark.parametrize("programs", [PROGRAMS, WITHOUT_KERNEL_LOCKS, *((one,) for one in PROGRAMS)], ids=str)
@pytest.mark.parametrize("mode", ["blocked", "calls"])
def test_programs_write_to_no_ring_where_they_could_sleep(programs: tuple[str, ...], mode: str) -> None:
    """Before 8b62645b09f8 the lock of a ring is a spinlock_t. With PREEMPT_RT that is a rt_mutex: a program
    at a switch that had to wait for it would call the scheduler within the scheduler."""
    settings = LoadSettings(
        programs, 8192, THREADS, 64, 0, 1, "contention", mode, (), has_holders=True, has_wait_samples=True
    )
    sleeping, raw, not_preemptible = Complete(("lock",)), Complete(("raw_lock",)), Complete(("rlock",))
    assert uses_of_rings(settings, sleeping) == []
    assert uses_of_rings(settings, raw) == uses_of_rings(settings, not_preemptible) != []


@needs("gcc")
def test_a_trace_counts_holders_without_a_ring() -> None:
    trace = Trace(files=("include/trace.bpf.h",), defines={"TRACE": None, "WITH_USER_STACKS": None})
    settings = LoadSettings(
        ("futex",), 8192, THREADS, 64, 0, 1, "contention", "calls", (), has_holders=True, trace=trace
    )
    host = Complete(("lock",))
    (_, switches) = choices_for(settings, host)
    assert switches.way and "WITH_USER_HOLDERS" in switches.way.defines
    assert uses_of_rings(settings, host) == []
    assert uses_of_rings(settings, Complete(())) != []
