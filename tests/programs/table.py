"""docs/lock-names.md: what lockd is to say of each program, and what it said when the tests last ran.

Usage: python3 -m tests.programs.table [new]

Writes it from expected.py and results.json; with `new` the results of the last run, which the tests leave in
build/, are taken over into results.json first.
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

What lockd says of locks in user space: their `kind`, their name (the label `lock`) and their `site`, the
function that waits. Each row is a real program of [tests/programs](../tests/programs/README.md) that waited,
and the tests assert each of them. `*` stands for anything; *the same* is what was expected.

- `lock` is `object:symbol` where the lock is a variable of a mapped object, with `+offset` in a variable of
  more than 64 bytes, and `object+offset` where the object has no symbols; else it is the site: locks on heaps
  and stacks have no name of their own, but the code that takes them has.
- `site` is `object:function` of the first function outside of what implements locks, or `object+offset` of
  its start if it has no symbol. It has no parameters, and no hash of the compiler.
- Time is counted under a lock's name only once that is known; see [metrics.md](metrics.md) for what is
  `other`. A lock of which there was nothing to tell, as none of its waiters had been captured, is `anon`
  until there is.

Stacks are not walked by frame pointers alone, since most distributions build their libc without: when the
first thread blocks on a lock, the programs take its registers and the first 4 KiB of its stack, and another
process unwinds them by the unwind tables (`.eh_frame`) of the mapped files, by frame pointers where code has
none, as compilers at run time.

The programs run where no debug symbols of the C library are installed, as on most hosts. Functions that only
it knows then have no names, and threads often wait in one that an exported function ends in a jump to, which
leaves nothing of that on the stack. So lockd looks for such jumps in the code of the exported locking
functions: what only `pthread_once` jumps to is shown as `pthread_once`; if there are several, as for
`pthread_join`, the stack shows `libc.so.6+offset`, but the kind is known. With debug symbols (`libc6-dbg`)
stacks have more names; kinds, locks and sites are the same.

Wrappers of locks are no sites either. Many are known by name; others by the words in their names, if these
say both what the lock is and that it is taken: `ngx_thread_mutex_lock`, `rocksdb::port::CondVar::Wait`;
`lock_accounts` or `Registry::lock` is a site. A function without a symbol that was called by one of the same
object that has one is shown as the place in that: `postgres:LockAcquireExtended+0x5a1`.

A part of a function that the compiler put elsewhere has the name of the function. MariaDB's own latches,
which wait by futex calls of the server itself, are told by the value that their word has then, as Debian's
`mariadbd` has no symbols for them; their names are offsets.

Locks that are variables have the same name after a restart, and on all hosts with the same build of a
program. So have the C library's own locks, one for each sort, whoever waits for whichever of them:
`libc.so.6:malloc` for those of its heaps, `libc.so.6:stdio` for those of its files. But a lock on a heap
that several functions take is named by the one that blocked first, and may be named by another after a
restart, as MariaDB's table cache is by `mariadbd:tc_acquire_table` or `mariadbd:tc_release_table`; `sites` in
`/api/v1/locks` has all that were seen. What has no symbol is called by an offset, which is another one in the
next build.

## Java

Every thread of Java sleeps on a word of its own, whatever it waits for: a lock, a queue, work of its pool.
So at each wait the programs read from HotSpot's memory which monitor the thread enters (`lock`) or has
called `wait()` of (`cond`), or else what it gave to `LockSupport.park()`: locks of
`java.util.concurrent.locks` are `lock`, conditions, queues, semaphores, latches and futures are `cond`.
That needs neither a perf map nor flags of the JVM, and agrees with Flight Recorder's `jdk.JavaMonitorEnter`
and `jdk.ThreadPark` (`tests/kernel/test_java.py`, with OpenJDK 17), which also count what a thread spins
before it sleeps.

- Without a perf map a lock has the name of its class, `[java]:com.shop.Registry` for a monitor of one,
  `[java]:java.util.concurrent.locks.ReentrantLock` for all of these, and no site; `lockd_advised_processes`
  and `lockd top` say so (`java`). `jcmd PID Compiler.perfmap` (JDK 17 and later) writes a map of what is
  compiled at that moment. lockd notices it when a thread next waits for a lock that was not captured for
  ten seconds, and from then on counts under names as `[jit]:com.shop.Registry.put`; what was counted before
  stays where it was. So for a map that is written anew, after a second, then after two, four and so on: in
  the end once a minute.
- A perf map or jitdump, of Java or any other program, is read only if it belongs to the one user that the
  process runs as, is a regular file with no other name, and no symbolic link leads there: else any user
  could have lockd tell what is in a file of root's.
- What is inlined into a method has that method's name, and what is interpreted that of its caller. Where code
  on the way was compiled after the map was written, the lock has the name of its class. Without
  `-XX:+PreserveFramePointer` a compiled caller may be missed.
- In `/api/v1/locks` the `address` of such a lock is a number that has its highest bit set: it tells the
  class and, of locks, conditions and semaphores, the object, or the monitor. An object that a collector
  moves is another lock there, of the same name. A monitor's memory that HotSpot gives to another object
  keeps its name, but never its kind.
- A class of a program's own that waits by `AbstractQueuedSynchronizer` is `cond` unless a map names its
  frames.
- Not read are ZGC, compact object headers, HotSpot before 17, machines other than HotSpot, and musl
  (`java_unknown`): a wait is then of the kind that the first one on the same word was of, mostly `cond`. So
  are a few waits of a JVM's first tenth of a second, or of lockd's, and those that began before lockd.

## Go

A goroutine that waits for a `sync.Mutex` makes no system call: its thread looks for another goroutine, and
sleeps in `runtime.stopm` if there is none, which is `cond`. Since Go 1.20 the runtime has a total of what
goroutines waited for mutexes. lockd reads it from its memory every ten seconds (`runtime.sched` and its
`totalMutexWaitTime`, found by symbol and DWARF) into `lockd_go_mutex_wait_seconds_total`; which mutex it
was, nobody counts. A program that was linked with `-s` or `-w` has no such series, and its own mutex
profile tells. The total is that of `/sync/mutex/wait/total` less what is waited for locks of the runtime
itself, which make system calls and are seen, as those of C are.

## PostgreSQL

Waits for lightweight locks are `lock`, named by what takes them. A backend that waits for a row, a table or
another transaction is no futex wait: it is in `epoll_wait`, as one that waits for its client is. It says so
in its title (`ps` shows `UPDATE waiting`), which the programs read, so that its time off the CPU has the
reason `lock` and not `poll`; which row or table it is, `pg_locks` tells. With `update_process_title = off`
it is `poll`, and if the server's processes are not called `postgres`.

## Each program
"""


PARKING = """\
## Locks that threads park on

Some programs use a lock as a gate: whoever has work for a thread holds the lock until there is some, and
the thread waits for it meanwhile, maybe for days. It is idle, and nobody contends. Such waits are of the
kind `cond`, as all waits for work, and no alert speaks of them. Those that lockd knows, as patterns of the
label `lock`:
"""

PARKING_ELSEWHERE = """\
Others are told to lockd by `names.parked` in its configuration, such as `["pooled:gate"]`; of an array of
locks all, by the array's name. A lock that has no name but the function that takes it is told by that. In a
program without symbols such a lock may have only a number, which is another in each build.

Only names tell them, as nothing else is certain. That the holder goes on, and never asks for the lock, is
so as well where it has forgotten to let go; that a thread always waits in one place, and does nothing under
the lock, also where the lock is the bottleneck; and neither is known before the wait has lasted for long.
Better that an alert is to be silenced once, by a name, than that a thread which is stuck is taken for idle.
"""


def results() -> dict[str, Any]:
    """As last seen: `names` by comm, and `server`."""
    read: dict[str, Any] = json.loads(RESULTS.read_text())
    return read


def document(shown: dict[str, Any]) -> str:
    """In Markdown."""
    names = [*_right(shown["names"]), *_names(shown["names"])]
    return "\n".join([HEAD, *names, *_parked(), *_server(shown["server"])])


def right(one: Scenario, said: dict[str, Any]) -> bool:
    return said["kind"] == one.kind and agrees(one.lock, said["lock"]) and agrees(one.site, said["site"])


def _right(said: dict[str, dict[str, Any]]) -> Iterator[str]:
    ran = [one for one in SCENARIOS if one.comm in said and not said[one.comm]["missing"]]
    sites = sum(agrees(one.site, said[one.comm]["site"]) for one in ran)
    everything = sum(right(one, said[one.comm]) for one in ran)
    yield f"At last the site was right for {sites} of {len(ran)} programs, everything for {everything}.\n"


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
    yield "| lock | of |"
    yield "|---|---|"
    yield from (f"| `{pattern}` | {whose} |" for pattern, whose in PARKED.items())
    yield ""
    yield PARKING_ELSEWHERE


def _server(said: dict[str, Any]) -> Iterator[str]:
    yield "## A server under load\n"
    named, anon = f"{said['named']:.2%}", f"{said['anon']:.2%}"
    yield f"Debian's {said['server']}; {said['clients']} clients insert, count rows and want unique ids,"
    yield f"from its start on: {said['seconds']:.0f} s of blocked time, {named} of it under a name,"
    yield f"{anon} `anon`. `LOCK_short_uuid_generator` is the mutex of `UUID_SHORT()`. The largest:\n"
    yield "| kind | lock | blocked |"
    yield "|---|---|---|"
    yield from (f"| {kind} | `{lock}` | {seconds:.1f} s |" for kind, lock, seconds in said["largest"])


def take_over() -> None:
    """The results of the last run; what it did not run stays as it was."""
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
