"""Harnesses for texts that people, programs and the kernel write, such as configurations and perf maps."""

from __future__ import annotations

import functools
import os
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockd.analyze import report, statistics
from lockd.analyze.records import read
from lockd.config import reader
from lockd.config.reader import described
from lockd.config.schema import AUTO, Config
from lockd.errors import ConfigError, UsageError
from lockd.names.labels.cgroup_paths import printable_path, unit_of, unit_of_cgroup_file
from lockd.names.locks.locking_code import Frame, is_parked_on, is_pool, judge
from lockd.names.objects.demangle import MAX_NAME, Demangler, shorten_name
from lockd.names.objects.jit import CODE, DUMP_HEADER, DUMP_MAGIC, MAX_MEMORY, RECORD, JitNames
from lockd.names.objects.mappings import Mappings
from tests.fuzz.harness import Harness, check_words, file_of, mutated, text_mutation

ROOT = Path(__file__).resolve().parents[2]
NAMES_HELD = 4 * 256
"""The most characters of a function's name of 256 bytes. A byte that is no UTF-8 is shown as `\\xff`."""


def read_config(data: bytes) -> None:
    """Any text gives a configuration, or one error that tells all that is wrong with it."""
    try:
        found = reader.read_file(Config, file_of(data))
    except ConfigError as error:
        check_words(str(error))
        return
    assert 10_000_000 <= found.period_ns <= 10_000_000_000
    assert found.maps.entries == AUTO or 64 <= found.maps.entries <= 1 << 20
    assert 1000 <= found.series.max <= 1_000_000
    assert found.histogram.buckets_us == tuple(sorted(set(found.histogram.buckets_us)))
    assert found.web.listen and all(0 <= port <= 65535 for _, port in found.web.listen)
    assert all(name.isprintable() for name in (*found.filter.units, *found.names.parked))


def configurations() -> list[bytes]:
    commented = (ROOT / "config/lockd.yaml").read_bytes()
    plain = b"\n".join(line.partition(b"#")[0] for line in commented.splitlines() if line.strip()[:1] != b"#")
    others = (
        b"period: 100ms\nfilter: {units: [nginx.service, 'user@*'], pids: [1, 2], max_block: 1h30m}\n",
        b"histogram:\n  buckets_us: [1, 4, 64]\nwindows: [1m, 5m]\nbudget: {cpu: 2.5%, requests: none}\n",
        b"web:\n  listen: ['[::1]:9776', ':80']\n  config_file: /etc/lockd/web.yml\nlog: {level: debug}\n",
        b"a: &x [*x]\nperiod: &y {<<: *y}\n? [1]\n: 2\n",
        b'programs: {kernel_locks: {mode: all, mechanism: kprobe}, futex: {enabled: no}}\n"\\e[2J": 1\n',
    )
    return [commented, plain, *others]


CONFIG_WORDS = (
    *(name.encode() for name in described(Config)), b"- ", b": ", b"[", b"]", b"{", b"}", b"&a ", b"*a",
    b"!!int ",
    b"!!python/object:os.system ", b"|\n ", b">\n ", b"'", b'"', b'"\\e"', b'"\\UFFFFFFFF"',
    b"\xef\xbb\xbf", b"\xff\xfe",
    b"50ms", b"2%", b"null", b"~", b"yes", b"010", b"1:30", b"<<: ", b"? ", b"%YAML 1.1\n---\n", b"...\n",
    b"\t",
    b"\xe2\x80\xa8", b"\xc2\x85",
)  # fmt: skip


def analyze(data: bytes) -> None:
    """For any file, `lockd analyze` prints and draws its results, or one error that tells what is wrong."""
    try:
        records = read([file_of(data)])
        lock = statistics.totals(records, "lock")[0].subject
        for _ in report.lines(records, lock, 10):
            pass
        starts = statistics.period_starts(records)
        if len(starts):
            statistics.average_access(records, starts)
            statistics.worst_average_access(records, starts)
            statistics.waiting_threads(records, starts)
    except UsageError as error:
        check_words(str(error))


def recorded() -> list[bytes]:
    begin, ms = 1_000_000_000_000, 1_000_000
    klock = f"""\
t,0,__mutex_lock.constprop.0+0x1f1,anon_pipe_write+0x43,vfs_write+0x398
s,writer,P10_T11,mutex,0xffff888100000040,{begin},{20 * ms},4,0
s,"a,b",P20_T20,rwsem_read,0xffff888100000080,{begin + 100 * ms},{2 * ms},1,1
s,writer,P10_T12,Mutex,0xffff888100000040,{begin + 200 * ms},{60 * ms},1,0,ongoing
"""
    return [
        klock.encode(),
        *(path.read_bytes() for path in (ROOT / "tests/unit/trace/futex_traces").glob("*.csv")),
    ]


@functools.cache
def _process() -> Path:
    """Return the directory of a process 7 in a small procfs."""
    directory = Path(tempfile.mkdtemp(prefix="lockd-fuzz-")) / "7"
    (directory / "root/tmp").mkdir(parents=True)
    uid = f"{os.getuid()}\t" * 4
    (directory / "status").write_text(f"Name:\tjava\nUid:\t{uid}\nNSpid:\t7\n")
    (directory / "stat").write_text(f"7 (java) S {'0 ' * 19}\n")
    return directory


def _compiled_functions(name: str, data: bytes) -> None:
    process = _process()
    for old in (process / "root/tmp").iterdir():
        old.unlink()
    (process / "root/tmp" / name).write_bytes(data)
    names = JitNames(process)
    given = struct.unpack_from("<4Q", data.ljust(32, b"\0"))
    for address in (0x1000, 0x5001, 0x7FD7A4ECA5E1, 2**64 - 1, *given):
        found = names.function(address, [])
        if found:
            assert found[0] <= address and len(found[1]) <= NAMES_HELD
    assert names.memory <= MAX_MEMORY + 10_000


def perf_map(data: bytes) -> None:
    """Whatever a process writes into its perf map, lockd has names of compiled functions or none."""
    _compiled_functions("perf-7.map", data)


def perf_maps() -> list[bytes]:
    """Return perf maps as the JVM, node and others write them."""
    return [
        b"0x00007fd7a4eca5e0 0x00000000000005c8 void Names$$Lambda$14/0x0000000800c01228.run()\n"
        b"0x00007fd7a4ecb000 0x0000000000000040 java.lang.Object a.B$C.<init>(java.lang.Object[], int)\n"
        b"0x00007fd7a4ecc000 0x0000000000000040 StubRoutines (1)\n",
        b"1000 20 LazyCompile:*take /srv/app.js:10\n5000 40 _ZN4shop4takeEi\n5000 8 py::put\n2000 1 x",
    ]


def jit_dump(data: bytes) -> None:
    """Whatever a process writes into its jitdump, lockd has names of compiled functions or none."""
    _compiled_functions("jit-7.dump", data)


def jit_dumps() -> list[bytes]:
    header = DUMP_HEADER.pack(DUMP_MAGIC, 1, 40, 62, 0, 3, 0, 0)
    load = CODE.pack(3, 3, 0x5000, 0x5000, 0x40, 1) + b"compiled\0" + bytes(0x40)
    debug = RECORD.pack(2, RECORD.size + 5, 0) + b"debug"
    one = RECORD.pack(0, RECORD.size + len(load), 0) + load
    return [header + debug + one, header + one + one[: RECORD.size + 10], header + RECORD.pack(0, 0, 0) + one]


def maps(data: bytes) -> None:
    """/proc/PID/maps may have any paths in it; lines that make no sense are left out."""
    found = Mappings(data)
    assert len(found.jit_dumps) <= len(found)
    found.code_files()
    for image in found.images_with_code():
        assert found.has_code(image) is not None and image.name is not None
    for address in (0, 0x555000000000, 0x555000002040, 0x7F0010028100, 2**64 - 1):
        mapping, image = found.find(address), found.image(address)
        assert mapping is None or mapping.start <= address < mapping.end
        assert image is None or image.name is not None
    found.image_of_inode(10)


def memory_maps() -> list[bytes]:
    own = Path("/proc/self/maps").read_bytes()
    return [
        b"555000000000-555000001000 r--p 00000000 08:01 10 /usr/bin/my server\n"
        b"555000001000-555000002000 r-xp 00001000 08:01 10 /usr/bin/my server\n"
        b"555000002000-555000003000 rw-p 00002000 08:01 10 /usr/bin/my server\n"
        b"555000003000-555000009000 rw-p 00000000 00:00 0\n"
        b"555010000000-555010021000 rw-p 00000000 00:00 0 [heap]\n"
        b"7f0010028000-7f0010030000 r-xp 00028000 08:01 20 /usr/lib/a\\012b\xff.so (deleted)\n"
        b"7f0010030000-7f0010031000 r-xp 00000000 08:01 21 /tmp/jit-7.dump\n",
        own[:3000],
    ]


@functools.cache
def _demangler() -> Demangler:
    return Demangler()


_asked = 0


def demangle(data: bytes) -> None:
    """Any symbol gives a name of bounded length that can be shown; the next question gets its own answer."""
    global _asked  # noqa: PLW0603  # makes each symbol a new one, for known ones are not asked for again
    name = _demangler().name(data.decode("utf-8", "backslashreplace"))
    assert len(name) <= MAX_NAME and name.isprintable()
    _asked += 1
    own = f"q{_asked}"
    symbol = f"_ZN{len(own)}{own}3putEv"
    found = _demangler().name(symbol)
    assert found in (f"{own}::put", symbol), f"{symbol} is called {found}"  # the symbol if it took too long


def symbols() -> list[bytes]:
    return [
        b"_ZN4shop8Registry3putERKSs", b"_ZNSt6vectorIiSaIiEE9push_backEOi.isra.0", b"plain",
        b"_ZN1aIS_E1bEv\n",
        b"_RNvNtCs1234_7mycrate3foo3bar", b"_ZN3std4sync5mutex14Mutex$LT$T$GT$4lock17h0123456789abcdefE",
        b"_ZN1xIXspT_EE1yIJDpT_EEEvv", b"_Z1fIN1aUlvE_EEvT_", b"runtime.(*mheap).alloc", b"_ZZN1a1bEvE1c",
    ]  # fmt: skip


def judged(data: bytes) -> None:
    """Judge a stack by the names of its functions, which may have been chosen so that it takes long."""
    names = [name.decode("utf-8", "backslashreplace") for name in data.split(b"\n")[:24]]
    objects = ("libc.so.6", "shop", "libjvm.so", "[jit]", "mariadbd", "libpython3.11.so.1.0")
    frames = []
    for at, name in enumerate(map(shorten_name, names)):
        of = objects[(at + len(data)) % len(objects)]
        frames.append(Frame(of, name, f"{of}:{name}", 0x1000, at))
    found = judge(frames, len(data) & 1)
    assert not found.site or any(found.site.startswith(frame.label) for frame in frames)
    assert found.kind in ("", "lock", "cond")
    for name in names[:2]:
        is_pool(shorten_name(name))
        is_parked_on(f"shop:{shorten_name(name)}", ("*:a*b*c*d*e*", "[!a]?*"))


def stacks_of_names() -> list[bytes]:
    return [
        b"__futex_abstimed_wait_common\n__pthread_mutex_lock\nstd::mutex::lock\nshop::Registry::put\nmain",
        b"syscall\n\nssux_lock_impl<true>::wr_wait\nbtr_cur_t::search_leaf\nhandle_one_connection",
        b"Java_x\nParker::park\njava.util.concurrent.locks.ReentrantLock.lock\ncom.shop.Sku.take",
        b"<std::sync::mutex::Mutex<T> as lock_api::RawMutex>::lock\n_ZN\na::my_mutex_lock\nA::A",
    ]


def units(data: bytes) -> None:
    """A cgroup with any path has a unit of bounded length."""
    for unit in (unit_of_cgroup_file(data), *(unit_of(printable_path(line)) for line in data.split(b"\n"))):
        assert max(map(len, unit)) <= 4 * len(data) + 40


def cgroups() -> list[bytes]:
    container = b"0123456789abcdef" * 4
    return [
        b"0::/user.slice/user-1000.slice/user@1000.service/app.slice/nginx.service/a.scope (deleted)",
        b"12:cpu:/docker/"
        + container
        + b"\n1:name=systemd:/system.slice/docker-"
        + container
        + b".scope\n0::/",
        b"0::/lxc.payload.web/machine.slice/machine-a.scope/kubepods-podX.slice:cri-containerd:" + container,
    ]


def _harness_of_text(
    name: str,
    run: Callable[[bytes], None],
    seeds: Callable[[], Sequence[bytes]],
    words: Sequence[bytes],
    **others: Any,
) -> Harness:
    return Harness(name, run, seeds, text_mutation(words), tuple(words), **others)


RECORD_WORDS = (
    b"s,",
    b"t,",
    b",ongoing",
    b"P1_T1",
    b"0xffff",
    b"Mutex",
    b"pid,tid,addr,",
    b'"',
    b",",
    b";",
    b"\xff",
)
MAP_WORDS = (b"0x", b" ", b"\n", b"java.lang.Object ", b"(", b")", b"/0x", b"\xff", b"\0", b"_ZN", b"f" * 17)
MAPS_WORDS = (
    b"-",
    b" rw-p ",
    b" r-xp ",
    b" (deleted)",
    b"[heap]",
    b"[vdso]",
    b"/dev/shm/",
    b"/jit-1.dump",
    b"\n",
)
SYMBOL_WORDS = (b"_Z", b"_R", b"_ZN", b"E", b"I", b"J", b"S_", b"T_", b"St", b"Dp", b"L_Z", b"\n",
                b".isra.0", b"$LT$",
                b"17h0123456789abcdef", b"Cs", b"Nv", b"B_")  # fmt: skip
NAME_WORDS = (
    b"::", b"mutex", b"Mutex", b"lock", b"Lock", b"_lock", b"rwlock", b"RWLock", b"cond", b"Condition",
    b"wait", b"sem",
    b"Semaphore", b"std::", b"core::", b"<", b">", b"operator", b"java.util.concurrent.locks.", b"$", b"__",
    b"sync::",
    b"a::" * 30, b"mutex" * 20, b"_" * 110, b"aLock" * 20, b"::lock" * 18, b"<" * 50,
    b"(anonymous namespace)::",
)  # fmt: skip
UNIT_WORDS = (
    b"/",
    b".service",
    b".scope",
    b"user@",
    b"a" * 64,
    b"-" * 200,
    b"lxc/",
    b"machine-",
    b" (deleted)",
    b":",
)

HARNESSES = (
    _harness_of_text("config", read_config, configurations, CONFIG_WORDS, longest=8192, seconds=5.0),
    _harness_of_text("analyze", analyze, recorded, RECORD_WORDS, seconds=2.0),
    _harness_of_text("perf-map", perf_map, perf_maps, MAP_WORDS),
    Harness("jitdump", jit_dump, jit_dumps, mutated),
    _harness_of_text("maps", maps, memory_maps, MAPS_WORDS),
    _harness_of_text("judge", judged, stacks_of_names, NAME_WORDS, longest=3000),
    _harness_of_text("units", units, cgroups, UNIT_WORDS, longest=8192),
    _harness_of_text("demangle", demangle, symbols, SYMBOL_WORDS, longest=2100),
)
