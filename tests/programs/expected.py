"""What lockd should say about each program: a table from which the tests and docs/lock-names.md are made."""

from __future__ import annotations

import re
from dataclasses import dataclass

ROUNDS = 40
HOLD_US = 50_000
PYTHON = "/usr/bin/python3"
MUSL_LOCKS = {"cond": "", "barrier": "", "tls": "builtin_tls+0x*"}
"""The names of locks that differ with musl. It keeps the words of conditions and barriers on the stack of the
waiting thread, and the thread-local variables of the first thread in a variable of its own.
"""


@dataclass(frozen=True)
class Scenario:
    """One lock of one program. In the expected `lock` and `site` a `*` stands for anything."""

    comm: str
    """The name of its process, by which scenarios are told apart."""
    language: str
    what: str
    command: tuple[str, ...]
    """The program, with a path that is absolute or relative to build/, and its arguments. {build} stands for
    that directory, {here} for the directory of the sources.
    """
    kind: str
    lock: str
    site: str
    makes: str = "c"
    """The target of the Makefile; empty if there is nothing to build."""
    waits: int | None = ROUNDS
    """The exact number of waits that block; None if the program does not know it."""
    where: str = ""
    """What is special about its process: see tests/kernel/test_lock_names.py."""


def _c(what: str, scenario: str, kind: str, lock: str, site: str) -> list[Scenario]:
    """Return the scenarios of one source: with glibc, with musl and, for some locks, without symbols."""
    rows = [
        Scenario(f"c.{scenario}", "C, glibc", what, ("names_c", scenario), kind, f"names_c:{lock or site}",
                 f"names_c:{site}")
    ]  # fmt: skip
    in_musl = MUSL_LOCKS.get(scenario, lock)
    rows.append(
        Scenario(f"musl.{scenario}", "C, musl, static", what, ("musl_c", scenario), kind,
                 f"musl_c:{in_musl or site}", f"musl_c:{site}", "musl")
    )  # fmt: skip
    if scenario in ("static", "heap", "read", "cond", "pi"):
        rows.append(
            Scenario(f"strip.{scenario}", "C, stripped", what, ("stripped_c", scenario), kind,
                     "stripped_c+0x*", "stripped_c+0x*")
        )  # fmt: skip
    return rows


def _cpp(what: str, scenario: str, kind: str, lock: str, site: str) -> Scenario:
    lock, site = f"names_cpp:{lock or site}", f"names_cpp:{site}"
    return Scenario(f"cpp.{scenario}", "C++", what, ("names_cpp", scenario), kind, lock, site)


def _rust(what: str, scenario: str, kind: str, lock: str, site: str) -> Scenario:
    site = f"names_rust:names_rust::{site}"
    lock = f"names_rust:names_rust::{lock}" if lock else site
    return Scenario(f"rs.{scenario}", "Rust", what, ("names_rust", scenario), kind, lock, site, "rust")


def _java(what: str, scenario: str, kind: str, method: str, waits: int | None = ROUNDS) -> Scenario:
    # HotSpot uses C1 only. Code of C2 deoptimizes at a branch that is taken for the first time, such as the
    # first wait for a lock, and the method goes on in the interpreter. Perf maps lack interpreted and inlined
    # methods.
    options = ("-XX:+PreserveFramePointer", "-XX:TieredStopAtLevel=1", "-XX:CompileCommand=quiet",
               "-XX:CompileCommand=dontinline,Names::*",
               "-XX:CompileCommand=dontinline,java.util.concurrent.locks.ReentrantLock::*",
               "-cp", "{build}")  # fmt: skip
    place = f"[jit]:*Names.{method}*"
    command = ("java", *options, "Names", scenario)
    return Scenario(
        f"java.{scenario}", "Java, C1 only", what, command, kind, place, place, "java", waits, "jcmd"
    )


def _python(what: str, scenario: str, kind: str, function: str) -> Scenario:
    command = (PYTHON, "{here}/names.py", scenario)
    place = f"names.py:{function}"
    return Scenario(f"py.{scenario}", "CPython", what, command, kind, place, place, "")


def _where(comm: str, where: str, what: str, program: str, scenario: str, lock: str, site: str) -> Scenario:
    return Scenario(comm, "C, glibc", what, (program, scenario), "lock", lock, site, where=where)


SCENARIOS = [
    *_c("static mutex", "static", "lock", "static_mutex", "lock_static_mutex"),
    *_c("global mutex", "global", "lock", "global_mutex", "lock_global_mutex"),
    *_c("mutex on the heap", "heap", "lock", "", "lock_heap_mutex"),
    *_c("mutex in a static struct", "member", "lock", "bank+0xc8", "lock_bank"),
    *_c("mutex with a time limit", "timed", "lock", "static_mutex", "lock_with_time_limit"),
    *_c("thread-local mutex of the thread", "tls_own", "lock", "tls_mutex", "lock_own_mutex"),
    *_c("thread-local mutex of another thread", "tls", "lock", "", "lock_mutex_of_main"),
    *_c("mutex with priority inheritance", "pi", "pi", "pi_mutex", "lock_pi_mutex"),
    *_c("rwlock, reader", "read", "lock", "rwlock", "read_table"),
    *_c("rwlock, writer", "write", "lock", "rwlock", "write_table"),
    *_c("condition variable", "cond", "cond", "news", "wait_for_news"),
    *_c("semaphore", "sem", "cond", "tokens", "take_token"),
    *_c("barrier", "barrier", "cond", "barrier", "meet"),
    *_c("join", "join", "cond", "", "join_worker"),
    *_c("once", "once", "lock", "once", "need_prepared"),
    _cpp("std::mutex of a namespace", "namespace", "lock", "shop::orders_mutex", "shop::lock_orders"),
    _cpp("std::mutex, static member", "class", "lock", "shop::Registry::mutex", "shop::Registry::lock"),
    _cpp("std::mutex on the heap", "heap", "lock", "", "shop::Account::deposit"),
    _cpp("std::mutex in a template", "template", "lock", "", "shop::Queue<*>::push"),
    _cpp("std::shared_mutex, reader", "read", "lock", "shop::catalogue", "shop::read_catalogue"),
    _cpp("std::shared_mutex, writer", "write", "lock", "shop::catalogue", "shop::write_catalogue"),
    _cpp("std::condition_variable", "cond", "cond", "shop::delivery", "shop::wait_for_delivery"),
    _cpp("guard of a static local variable", "guard", "lock", "*shop::settings*::made", "shop::settings"),
    _rust("std Mutex", "mutex", "lock", "ORDERS", "lock_orders"),
    _rust("std RwLock, reader", "read", "lock", "CATALOGUE", "read_catalogue"),
    _rust("std RwLock, writer", "write", "lock", "CATALOGUE", "write_catalogue"),
    _rust("std Condvar", "cond", "cond", "DELIVERY", "wait_for_delivery"),
    _rust("std Once", "once", "lock", "", "need_prepared"),
    _rust("std JoinHandle", "join", "cond", "", "join_worker"),
    _rust("std thread::park", "park", "cond", "", "park_until_work"),
    _rust("parking_lot Mutex", "pl_mutex", "lock", "", "lock_fast_orders"),
    _rust("parking_lot RwLock, reader", "pl_read", "lock", "", "read_fast_catalogue"),
    _rust("parking_lot RwLock, writer", "pl_write", "lock", "", "write_fast_catalogue"),
    _rust("parking_lot Condvar", "pl_cond", "cond", "", "wait_for_fast_delivery"),
    Scenario("go.park", "Go", "threads without work, as goroutines wait", ("names_go",), "cond",
             "names_go:runtime.*", "names_go:runtime.*", "go", None),
    Scenario("go.cgo", "Go, cgo", "static mutex of C", ("names_cgo",), "lock", "names_cgo:ledger_mutex",
             "names_cgo:lock_ledger", "cgo"),
    _java("synchronized", "monitor", "lock", "enterMonitor", None),
    _java("Object.wait", "wait", "cond", "waitForNews"),
    _java("ReentrantLock", "reentrant", "lock", "lockReentrant"),
    _java("Semaphore", "semaphore", "cond", "takeToken"),
    _python("threading.Lock", "lock", "lock", "lock_orders"),
    _python("threading.Condition", "condition", "cond", "wait_for_news"),
    _python("queue.Queue", "queue", "cond", "get_work"),
    Scenario("py.gil", "CPython", "the interpreter itself", (PYTHON, "{here}/names.py", "gil"), "lock",
             "python3*:GIL", "python3*:*", "", None),
    _where("so.global", "", "mutex of a shared library", "names_so", "global",
           "libregistry.so:registry_mutex", "libregistry.so:registry_lock"),
    _where("so.static", "", "static mutex of a shared library", "names_so", "static",
           "libregistry.so:log_mutex", "libregistry.so:registry_log_lock"),
    _where("ns.mount", "mount namespace", "in another mount namespace", "names_so", "global",
           "libregistry.so:registry_mutex", "libregistry.so:registry_lock"),
    _where("ns.pid", "pid namespace", "in another pid namespace", "names_c", "static", "names_c:static_mutex",
           "names_c:lock_static_mutex"),
    _where("gone", "deleted", "executable deleted", "names_c", "static", "names_c:static_mutex",
           "names_c:lock_static_mutex"),
    _where("replaced", "replaced", "executable replaced by another program", "names_c", "static",
           "names_c:static_mutex", "names_c:lock_static_mutex"),
    _where("jit", "perf map", "call site compiled at run time, in /tmp/perf-PID.map", "names_jit", "heap",
           "[jit]:jit_lock_account", "[jit]:jit_lock_account"),
]  # fmt: skip


def agrees(expected: str, said: str) -> bool:
    """Whether lockd said a name as expected; `*` in the expected name stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, expected.split("*"))), said) is not None
