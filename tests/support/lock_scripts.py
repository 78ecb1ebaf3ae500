"""Scripts for the kernel test module. Each function that takes a lock is called on a free
lock, on a contended one and in vain."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.support.lock_module import Script

ROUNDS = 2
HOLD_US = 50_000

RELEASE = {
    "mutex_lock": "mutex_unlock",
    "mutex_lock_io": "mutex_unlock",
    "mutex_lock_interruptible": "mutex_unlock",
    "mutex_lock_killable": "mutex_unlock",
    "mutex_trylock": "mutex_unlock",
    "down_read": "up_read",
    "down_read_interruptible": "up_read",
    "down_read_killable": "up_read",
    "down_read_trylock": "up_read",
    "down_write": "up_write",
    "down_write_killable": "up_write",
    "down_write_trylock": "up_write",
    "down": "up",
    "down_interruptible": "up",
    "down_killable": "up",
    "down_timeout": "up",
    "down_trylock": "up",
}
"""The function that releases the lock, by the function that takes it."""
EXCLUSIVE = {"mutex": "mutex_lock", "rwsem": "down_write", "semaphore": "down"}
"""The function that takes a lock for one thread alone, by lock."""
LONG_US = 10_000_000


def scripts() -> dict[str, Script]:
    """Return the scripts for which every count is known, by name."""
    functions = [name for name in RELEASE if _has(name)]
    trying = [name for name in functions if name.endswith("_trylock")]
    waiting = [name for name in functions if name not in trying]
    ended = [name for name in waiting if name.endswith(("_interruptible", "_killable"))]
    return {
        **{f"free {name}": _free(name) for name in functions},
        **{f"contended {name}": _contended(name) for name in waiting},
        **{f"in vain {name}": _in_vain(name) for name in trying},
        **{f"gave up {name}": _gave_up(name) for name in ended},
        **_others(),
    }


@cache
def _has(name: str) -> bool:
    if name != "down_read_interruptible":
        return True
    symbols = Path("/proc/kallsyms").read_text().splitlines()
    return any(line.split()[2] == name for line in symbols)  # since 5.11


def _lock(function: str) -> str:
    if function.startswith("mutex"):
        return "mutex"
    return "rwsem" if function.startswith(("down_read", "down_write")) else "semaphore"


def _take(function: str, timeout_us: int = LONG_US) -> str:
    number = f"{timeout_us} " if function == "down_timeout" else ""
    return f"{function} {number}{_lock(function)}"


def _free(function: str) -> Script:
    lock = _lock(function)
    return Script({"one": f"{_take(function)}, sleep 500, {RELEASE[function]} {lock}"}, 5 * ROUNDS)


def _holder(function: str, meanwhile: str) -> str:
    """Return the steps of a thread that holds a lock while another one takes or tries it with `function`."""
    lock = _lock(function)
    take = EXCLUSIVE[lock]
    return f"{take} {lock}, {meanwhile}, {RELEASE[take]} {lock}"


def _contended(function: str) -> Script:
    lock = _lock(function)
    holder = _holder(function, f"asleep 1 {lock}, sleep {HOLD_US}")
    waiter = f"held 1 {lock}, {_take(function)}, sleep 500, {RELEASE[function]} {lock}"
    return Script({"holder": holder, "waiter": waiter}, ROUNDS)


def _in_vain(function: str) -> Script:
    lock = _lock(function)
    # The trier takes a second lock to say that it has tried the first one.
    tried = "semaphore2" if lock == "mutex" else "mutex2"
    take, release = ("down", "up") if lock == "mutex" else ("mutex_lock", "mutex_unlock")
    trier = f"held 1 {lock}, {_take(function)}, {take} {tried}, held 0 {lock}, {release} {tried}"
    return Script({"holder": _holder(function, f"held 1 {tried}"), "trier": trier}, ROUNDS)


def _gave_up(function: str) -> Script:
    lock = _lock(function)
    end = "kill" if function.endswith("_killable") else "interrupt"
    meanwhile = f"asleep 1 {lock}, sleep {HOLD_US}, {end} waiter, called 0 {lock}, sleep {HOLD_US}"
    return Script(
        {"holder": _holder(function, meanwhile), "waiter": f"held 1 {lock}, {_take(function)}"}, ROUNDS
    )


def _others() -> dict[str, Script]:
    hold = f"sleep {HOLD_US}"
    return {
        "gave up down_timeout": Script(
            {
                "holder": "down semaphore, held 1 mutex2, up semaphore",
                "waiter": "held 1 semaphore, down_timeout 20000 semaphore, "
                "mutex_lock mutex2, held 0 semaphore, mutex_unlock mutex2",
            },
            ROUNDS,
        ),
        "downgraded": Script(
            {"one": f"down_write rwsem, {hold}, downgrade_write rwsem, {hold}, up_read rwsem"}, ROUNDS
        ),
        "downgraded before a reader": Script(
            {
                "writer": f"down_write rwsem, asleep 1 rwsem, {hold}, downgrade_write rwsem, {hold}, "
                "up_read rwsem",
                "reader": f"held 1 rwsem, down_read rwsem, {hold}, up_read rwsem",
            },
            ROUNDS,
        ),
        "released out of order": Script(
            {
                "one": f"mutex_lock mutex, mutex_lock mutex2, mutex_lock mutex3, {hold}, "
                f"mutex_unlock mutex, {hold}, mutex_unlock mutex3, {hold}, mutex_unlock mutex2"
            },
            ROUNDS,
        ),
        "of all kinds at a time": Script(
            {
                "one": f"mutex_lock mutex, down_read rwsem, down_write rwsem2, down semaphore, {hold}, "
                f"up_read rwsem, {hold}, mutex_unlock mutex, up semaphore, {hold}, up_write rwsem2"
            },
            ROUNDS,
        ),
        "ww_mutex": Script({"one": f"ww_mutex_lock ww_mutex, {hold}, ww_mutex_unlock ww_mutex"}, ROUNDS),
        "read twice by a thread": Script(
            {
                "one": f"down_read rwsem, {hold}, down_read rwsem, {hold}, "
                f"up_read rwsem, {hold}, up_read rwsem"
            },
            ROUNDS,
        ),
        "read by several": Script({"reader*8": f"down_read rwsem, {hold}, up_read rwsem"}, ROUNDS),
        "allocated": Script(
            {
                "holder": "mutex_lock allocated_mutex, down_write allocated_rwsem, down allocated_semaphore, "
                f"asleep 1 allocated_mutex, {hold}, mutex_unlock allocated_mutex, "
                f"asleep 1 allocated_rwsem, {hold}, up_write allocated_rwsem, "
                f"asleep 1 allocated_semaphore, {hold}, up allocated_semaphore",
                "waiter": "held 1 allocated_semaphore, mutex_lock allocated_mutex, "
                "down_read allocated_rwsem, down allocated_semaphore, "
                "up allocated_semaphore, up_read allocated_rwsem, mutex_unlock allocated_mutex",
            },
            ROUNDS,
        ),
        "semaphore released by another": Script(
            {"taker": "down semaphore", "releaser": f"held 1 semaphore, {hold}, up semaphore"},
            ROUNDS,
            lingers=True,
        ),
        "rwsem released by another": Script(
            {"taker": "down_read rwsem", "releaser": f"held 1 rwsem, {hold}, up_read rwsem"},
            ROUNDS,
            lingers=True,
        ),
        "semaphore waited for by its holder, released by another": Script(
            {
                "taker": "down semaphore, down semaphore, mutex_lock mutex, held 0 semaphore, "
                "mutex_unlock mutex",
                "releaser": f"asleep 1 semaphore, {hold}, up semaphore, held 1 mutex, {hold}, up semaphore",
            },
            ROUNDS,
            lingers=True,
        ),
        "semaphore waited for, released by another": Script(
            {
                "holder": f"down semaphore, asleep 1 semaphore, {hold}, up semaphore",
                "taker": "held 1 semaphore, down semaphore, "
                "mutex_lock mutex, held 0 semaphore, mutex_unlock mutex",
                "releaser": f"held 1 mutex, {hold}, up semaphore",
            },
            ROUNDS,
            lingers=True,
        ),
    }


CROWDS = {
    "taken three times by a thread": Script(
        {
            "holder": "down counting, down counting, down counting, asleep 5 counting, "
            f"sleep {HOLD_US}, up counting, sleep {HOLD_US}, up counting, sleep {HOLD_US}, up counting",
            "waiter*5": f"held 3 counting, down counting, sleep {HOLD_US}, up counting",
        }
    ),
    "readers and writers": Script(
        {
            "first": f"down_write rwsem, asleep 20 rwsem, sleep {HOLD_US}, up_write rwsem",
            "reader*10": "held 1 rwsem, down_read rwsem, sleep 1000, up_read rwsem",
            "writer*10": "held 1 rwsem, down_write rwsem, sleep 1000, up_write rwsem",
        },
        2,
    ),
    "64 in down()": Script(
        {
            "holder": f"down semaphore, asleep 64 semaphore, sleep {HOLD_US}, up semaphore",
            "waiter*64": "held 1 semaphore, down semaphore, sleep 500, up semaphore",
        }
    ),
    "200 in mutex_lock()": Script(
        {
            "holder": f"mutex_lock mutex, asleep 200 mutex, sleep {HOLD_US}, mutex_unlock mutex",
            "waiter*200": "held 1 mutex, mutex_lock mutex, sleep 500, mutex_unlock mutex",
        }
    ),
    "100 readers and 50 writers": Script(
        {
            "first": f"down_write rwsem, asleep 150 rwsem, sleep {HOLD_US}, up_write rwsem",
            "reader*100": "held 1 rwsem, down_read rwsem, sleep 500, up_read rwsem",
            "writer*50": "held 1 rwsem, down_write rwsem, sleep 500, up_write rwsem",
        }
    ),
}
"""Scripts with more threads in a function at a time than kretprobes can follow, by name."""
