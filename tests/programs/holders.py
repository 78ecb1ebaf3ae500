"""Three functions of Python hold a lock, for 5, 20 and 75% of the time, while threads ask for it.

`holders.py LOCK [ASKERS=3] [SECONDS=10]`, with the protocol of README.md. LOCK is `lock`, `rlock` or `gil`.
With `gil`, the functions compute, and the threads that ask for the lock want to go on after a sleep.
"""

from __future__ import annotations

import bisect
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

KNOWN_SECONDS = 1.5
"""The time after which lockd knows the lock and its kind."""
MEANS = {"short": 0.002, "some": 0.008, "long": 0.030}
"""Seconds for which each function holds the lock, on average."""
PAUSE = 0.0003

holds: list[tuple[float, float, str]] = []
"""For each hold: when it began, when it ended, and which function held the lock."""
waits: list[tuple[float, float]] = []
"""For each wait: when a thread asked for the lock, and when it got it."""
asks = threading.Event()
"""Set while threads are to ask for the lock."""
lock, rlock = threading.Lock(), threading.RLock()


def random_seconds(which: str) -> float:
    return MEANS[which] * random.uniform(0.5, 1.5)


def hold(which: str) -> None:
    """Sleep, with the lock held."""
    begin = time.monotonic()
    time.sleep(random_seconds(which))
    holds.append((begin, time.monotonic(), which))


def lock_short() -> None:
    with lock:
        hold("short")


def lock_some() -> None:
    lock.acquire()
    hold("some")
    lock.release()


def lock_long() -> None:
    with lock:
        hold("long")


def rlock_short() -> None:
    with rlock:
        hold("short")


def rlock_some() -> None:
    with rlock, rlock:
        hold("some")


def rlock_long() -> None:
    with rlock:
        hold("long")


def gil_short() -> None:
    begin = now = time.monotonic()
    end = begin + random_seconds("short")
    while now < end:
        now = time.monotonic()
    holds.append((begin, now, "short"))


def gil_some() -> None:
    begin = now = time.monotonic()
    end = begin + random_seconds("some")
    while now < end:
        now = time.monotonic()
    holds.append((begin, now, "some"))


def gil_long() -> None:
    begin = now = time.monotonic()
    end = begin + random_seconds("long")
    while now < end:
        now = time.monotonic()
    holds.append((begin, now, "long"))


def ask(take: Callable[[], None]) -> None:
    while True:
        if asks.is_set():
            take()
        else:
            time.sleep(PAUSE)


def take_lock() -> None:
    asked = time.monotonic()
    with lock:
        waits.append((asked, time.monotonic()))
    time.sleep(PAUSE)


def take_rlock() -> None:
    asked = time.monotonic()
    with rlock:
        waits.append((asked, time.monotonic()))
    time.sleep(PAUSE)


def take_gil() -> None:
    due = time.monotonic() + PAUSE
    time.sleep(PAUSE)
    waits.append((due, max(due, time.monotonic())))


LOCKS = {
    "lock": ((lock_short, lock_some, lock_long), take_lock),
    "rlock": ((rlock_short, rlock_some, rlock_long), take_rlock),
    "gil": ((gil_short, gil_some, gil_long), take_gil),
}


def hold_for(seconds: float, functions: Sequence[Callable[[], None]], pause: float) -> None:
    asks.set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        random.choice(functions)()
        if pause:
            time.sleep(pause)
    asks.clear()
    time.sleep(0.2)  # until nobody asks any more


def truth() -> dict[str, object]:
    """Return how long threads waited, the number of holds, and how long threads waited while each function
    held the lock, in microseconds. Holds do not overlap.
    """
    waited = dict.fromkeys(MEANS, 0.0)
    ends = [end for _, end, _ in holds]
    for asked, got in waits:
        at = bisect.bisect_right(ends, asked)
        while at < len(holds) and holds[at][0] < got:
            begin, end, which = holds[at]
            waited[which] += min(end, got) - max(begin, asked)
            at += 1
    return {
        "waited_us": round(1e6 * sum(got - asked for asked, got in waits)),
        "holds": len(holds),
        "holders": {which: round(1e6 * seconds) for which, seconds in waited.items()},
    }


def main() -> None:
    which, askers, seconds = [*sys.argv[1:], *("lock", "3", "10")[len(sys.argv) - 1 :]]
    functions, take = LOCKS[which]
    pause = 0 if which == "gil" else PAUSE
    if comm := os.environ.get("LOCKD_COMM"):
        Path("/proc/self/comm").write_text(comm)
    print("ready", os.getpid(), flush=True)
    if not os.read(0, 1):
        sys.exit("the test went away")
    threads = [threading.Thread(target=ask, args=(take,), daemon=True) for _ in range(int(askers))]
    for thread in threads:
        thread.start()
    hold_for(KNOWN_SECONDS, functions, pause)
    holds.clear()
    waits.clear()
    print("{}", flush=True)
    if not os.read(0, 1):
        sys.exit("the test went away")
    hold_for(float(seconds), functions, pause)
    print(json.dumps(truth()), flush=True)
    os.read(0, 1)


main()
