"""Writes docs/lock-names.md: what lockd should say about each program, and what it said in the last test run.

Usage: python3 -m tests.programs.table [new]

The document is made from expected.py and results.json. With `new`, results.json first takes over the results
of the last run, which the tests leave in build/.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockd.names.locks.locking_code import PARKED
from tests.programs.expected import SCENARIOS, Scenario, agrees

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
DOCUMENT = ROOT / "docs/lock-names.md"

HEAD = """\
# Names of locks

<!-- Made by tests/programs/table.py from expected.py there and what the tests saw; change it there. -->

What lockd says about locks in user space: their `kind`, their name (the label `lock`) and their `site`, the
function that waits. Each row of the table below is a real program of
[tests/programs](../tests/programs/README.md) that waited, and the tests assert each of them. `*` stands for
anything; *the same* means that lockd said what was expected.

- `lock` is `object:symbol` if the lock is a variable of a mapped object, with `+offset` in a variable of
  more than 64 bytes, and `object+offset` if the object has no symbols. Otherwise `lock` is the site: a lock
  on the heap or on a stack has no name of its own, but the code that takes it has one.
- `site` is `object:function` of the first function outside of the code that implements locks, or
  `object+offset` of the function's start if it has no symbol. It has no parameters and no hash of the
  compiler.
- Time counts under the name of a lock only once that name is known; [metrics.md](metrics.md) says what
  counts as `other`. A lock is `anon` while none of its waiters could be captured, so that nothing is known
  of it.

## How names are found

Most distributions build their C library without frame pointers, so stacks are not walked by frame pointers
alone. When the first thread blocks on a lock, the BPF programs copy the thread's registers and the top 4 KiB
of its stack. The namer unwinds this stack by the unwind tables (`.eh_frame`) of the mapped files, and by
frame pointers in code without such tables, such as code compiled at run time.

The kind follows from the futex operation and the value waited for, or from the functions on the stack where
these say more.

**Without debug symbols.** The test programs run without debug symbols of the C library, as on most hosts.
Functions that only the debug symbols name then have no names. Threads often wait in a function that an
exported function reaches by a jump at its end, which leaves no trace of the exported function on the stack.
So lockd looks for such jumps in the code of the exported locking functions. A function to which only
`pthread_once` jumps is shown as `pthread_once`. If several functions jump to it, as for `pthread_join`, the
stack shows `libc.so.6+offset`, but the kind is known. With debug symbols (`libc6-dbg`) stacks have more
names; kinds, locks and sites are the same.

**Wrappers** of locks are not sites either. Many are known by name. Others are recognised by the words in
their names, if these say both what the lock is and that it is taken: `ngx_thread_mutex_lock`,
`rocksdb::port::CondVar::Wait`. `lock_accounts` or `Registry::lock`, however, is a site. A function without
a symbol whose caller, in the same object, has one is shown as a place in its caller:
`postgres:LockAcquireExtended+0x5a1`. A part of a function that the compiler put elsewhere has the name of
the function.

**MariaDB's own latches** wait by futex calls of the server itself. They are recognised by the value
of the futex word while a thread waits, because Debian's `mariadbd` has no symbols for them. Their names are
offsets.

**Stable names.** Locks that are variables have the same name after a restart, and on all hosts with the
same build of a program. The C library's own locks have one name for each sort, whichever of them a thread
waits for: `libc.so.6:malloc` for its heaps, `libc.so.6:stdio` for its files. A lock on the heap that
several functions take has the name of the function that blocked first, which may be another one after a
restart: MariaDB's table cache is `mariadbd:tc_acquire_table` or `mariadbd:tc_release_table`. `sites` in
`/api/v1/locks` has the first 16 of these functions. A name that is an offset changes with each build.
Symbols have 120 characters at most: template arguments become `<...>`, and what is still too long is cut off.
Functions of Python have 250, and names of Java classes 512 bytes.

## Java

Each Java thread sleeps on a word of its own, whether it waits for a lock, for a queue or for work of its
pool. So at each wait the BPF programs read from HotSpot's memory what it waits for: the monitor that the
thread enters (`lock`) or on which it has called `wait()` (`cond`), or else the object that it gave to
`LockSupport.park()`. Locks of `java.util.concurrent.locks` are `lock`; conditions, queues, semaphores,
latches and futures are `cond`. This needs neither a perf map nor flags of the JVM. It agrees with Flight
Recorder's `jdk.JavaMonitorEnter` and `jdk.ThreadPark` (`test_java.py`, with OpenJDK 17), which also count
the time that a thread spins before it sleeps.

- Without a perf map a lock has the name of its class and no site: `[java]:com.shop.Registry` for a monitor
  of that class, `[java]:java.util.concurrent.locks.ReentrantLock` for all of these locks.
  `lockd_advised_processes` and `lockd top` say so (`java`). `jcmd PID Compiler.perfmap` (JDK 17 and later)
  writes a map of the code that is compiled at that moment. lockd notices it when a thread next waits for a
  lock that was not captured for ten seconds. From then on waits count under names such as
  `[jit]:com.shop.Registry.put`; earlier counts stay where they were. If the map is written again and again,
  lockd reads it after a second, then after two, four and so on, in the end once a minute.
- A perf map or jitdump, of Java or any other program, is read only if it belongs to the one user as which
  the process runs, is a regular file with no other name, and is reached through no symbolic link. Otherwise
  any user could make lockd show the content of a file of root's. A file that was last changed before the
  process started is not read either: an earlier process with the same id wrote it, for instance the one that
  ran in the container before its restart.
- Code that is inlined into a method has that method's name. Interpreted code has the name of its caller. If
  code on the stack was compiled after the map was written, the lock has the name of its class. Without
  `-XX:+PreserveFramePointer` a compiled caller may be missed.
- The `address` of such a lock in `/api/v1/locks` is a number with its highest bit set. It identifies the
  class and, for locks, conditions, semaphores and monitors, the object. An object that a garbage collector
  moves becomes another lock there, with the same name. If HotSpot gives the memory of a monitor to another
  object, the lock of that object keeps the name, but never the kind.
- A class of the program's own that waits by `AbstractQueuedSynchronizer` is `cond` unless a map names its
  frames.
- lockd cannot read ZGC, compact object headers, HotSpot before 17, Java machines other than HotSpot, and
  musl (`java_unknown`). A wait is then of the kind of the first wait on the same word, mostly `cond`. The
  same holds for a few waits in the first tenth of a second of a JVM or of lockd, and for waits that began
  before lockd.

## Go

A goroutine that waits for a `sync.Mutex` makes no system call. Its thread looks for another goroutine, and
sleeps in `runtime.stopm` if there is none, which is `cond`. Since Go 1.20 the runtime keeps a total of the
time that goroutines waited for mutexes. lockd reads it from the memory of the process every ten seconds
(`runtime.sched` and its `totalMutexWaitTime`, found by symbol and DWARF) into
`lockd_go_mutex_wait_seconds_total`. It does not say for which mutex. A program that was linked with `-s` or
`-w` has no such series; only its own mutex profile helps. The total is that of `/sync/mutex/wait/total`,
less the waits for locks of the runtime itself. These make system calls and are seen like those of C.

## PostgreSQL

Waits for lightweight locks are `lock` and are named by the function that takes them. A backend that waits
for a row, a table or another transaction makes no futex wait. It is in `epoll_wait`, like a backend that
waits for its client. Its title says so (`ps` shows `UPDATE waiting`), and the BPF programs read the title.
So its time off the CPU has the reason `lock` and not `poll`; `pg_locks` says which row or table it is. With
`update_process_title = off`, or if the server's processes are not called `postgres`, the reason is `poll`.

## Each program
"""


PARKING = """\
## Locks that threads park on

Some programs use a lock as a gate: one thread holds the lock until there is work, and idle threads wait for
the lock meanwhile, maybe for days. This is not contention. Such waits are of the kind
`cond`, like all waits for work, and no alert is about them. lockd knows these locks, as patterns of the
label `lock`:
"""

PARKING_ELSEWHERE = """\
`names.parked` in the configuration names others, such as `["pooled:gate"]`. For an array of locks, the name
of the array means all of them. A lock on the heap is called by the function that takes it. In a program
without symbols that name may be only an offset, which changes with each build. Brackets are special in
patterns, but a whole name such as `"[java]:com.shop.Gate"` means itself. The pattern for all classes of a
package is `"[[]java]:com.shop.*"`.

Only names identify such locks, because no behaviour does so for certain. If the holder keeps the lock and
runs on, it may also have forgotten to release it. If a thread always waits in one place and does nothing with
the lock held, the lock may also be the bottleneck. And neither is known before the wait has lasted for long.
It is better to silence an alert once, by a name, than to take a stuck thread for an idle one.
"""


def results() -> dict[str, Any]:
    """Return the results that were last taken over: `names` by comm, and `server`."""
    read: dict[str, Any] = json.loads(RESULTS.read_text())
    return read


def document(shown: dict[str, Any]) -> str:
    """Return docs/lock-names.md with these results, in Markdown."""
    names = [*_right(shown["names"]), *_names(shown["names"])]
    return "\n".join([HEAD, *names, *_parked(), *_server(shown["server"])])


def right(one: Scenario, said: dict[str, Any]) -> bool:
    return said["kind"] == one.kind and agrees(one.lock, said["lock"]) and agrees(one.site, said["site"])


def _right(said: dict[str, dict[str, Any]]) -> Iterator[str]:
    ran = [one for one in SCENARIOS if one.comm in said and not said[one.comm]["missing"]]
    sites = sum(agrees(one.site, said[one.comm]["site"]) for one in ran)
    everything = sum(right(one, said[one.comm]) for one in ran)
    yield f"In the last run the site was right for {sites} of {len(ran)} programs,"
    yield f"and kind, lock and site for {everything}.\n"


def _names(said: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| program | waits for | kind | lock | site | lockd said | waits counted |"
    yield "|---|---|---|---|---|---|---|"
    for one in SCENARIOS:
        mine = said.get(one.comm, {"missing": "not run yet"})
        cells = [one.language, one.what, one.kind, f"`{one.lock}`", f"`{one.site}`", _words(one, mine)]
        counted = "" if mine["missing"] else str(mine["waits"])
        if counted and one.waits is not None:
            counted += f" of {mine['told']}"
        yield "| " + " | ".join([*cells, counted]) + " |"
    yield ""


def _words(one: Scenario, said: dict[str, Any]) -> str:
    if said["missing"]:
        return f"not run: {said['missing']}"
    if right(one, said) and "*" not in one.lock + one.site:
        return "the same"
    return f"{said['kind']} `{said['lock']}` `{said['site']}`"


def _parked() -> Iterator[str]:
    yield PARKING
    yield "| lock | program |"
    yield "|---|---|"
    yield from (f"| `{pattern}` | {whose} |" for pattern, whose in PARKED.items())
    yield ""
    yield PARKING_ELSEWHERE


def _server(said: dict[str, Any]) -> Iterator[str]:
    yield "## A server under load\n"
    named, anon = f"{said['named']:.2%}", f"{said['anon']:.2%}"
    yield f"In Debian's {said['server']}, {said['clients']} clients insert and count rows and ask for unique"
    yield f"ids. From its start on there were {said['seconds']:.0f} s of blocked time, {named} of it under a"
    yield f"name and {anon} `anon`. `LOCK_short_uuid_generator` is the mutex of `UUID_SHORT()`. Locks with"
    yield "the most blocked time are:\n"
    yield "| kind | lock | blocked |"
    yield "|---|---|---|"
    yield from (f"| {kind} | `{lock}` | {seconds:.1f} s |" for kind, lock, seconds in said["largest"])


def take_over() -> None:
    """Take over the results of the last run into results.json. Programs that it did not run keep theirs."""
    known = results() if RESULTS.exists() else {"names": {}, "server": {}}
    for comm, said in json.loads((HERE / "build/results.json").read_text()).items():
        del said["stack"], said["comm"]
        if not said["missing"] or comm not in known["names"]:
            known["names"][comm] = said
    known["server"] = json.loads((HERE / "build/server.json").read_text())
    comms = [one.comm for one in SCENARIOS]
    known["names"] = {comm: known["names"][comm] for comm in comms if comm in known["names"]}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["new"]:
        take_over()
    DOCUMENT.write_text(document(results()))
