"""Threads of Python wait for locks, each in a function of its own, or crowd for the interpreter itself.

`names.py SCENARIO [ROUNDS=40] [HOLD_US=50000]`, with the protocol of README.md.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

FUTEX = {"x86_64": "202", "aarch64": "98"}
IN_THE_INTERPRETER = 4
"""The number of threads that compute at the same time."""

lock = threading.Lock()
condition = threading.Condition()
work: queue.Queue[int] = queue.Queue()
news: list[int] = []


def lock_orders() -> None:
    with lock:
        pass


def hold_orders(hold: Callable[[], None]) -> None:
    with lock:
        hold()


def wait_for_news() -> None:
    with condition:
        condition.wait_for(lambda: news)
        news.clear()


def tell_news(hold: Callable[[], None]) -> None:
    hold()
    with condition:
        news.append(1)
        condition.notify()


def get_work() -> None:
    work.get()


def put_work(hold: Callable[[], None]) -> None:
    hold()
    work.put(1)


SCENARIOS = {
    "lock": (hold_orders, lock_orders),
    "condition": (tell_news, wait_for_news),
    "queue": (put_work, get_work),
}


def until(holds: Callable[[], bool]) -> None:
    """Sleep until `holds()` is true, without a futex call."""
    while not holds():
        time.sleep(50e-6)


def is_in_futex(tid: int) -> bool:
    call = Path(f"/proc/self/task/{tid}/syscall").read_text()
    return call.split()[0] == FUTEX[os.uname().machine]


def hand_over(scenario: str, rounds: int, held: float) -> dict[str, int]:
    """Make a thread wait for the lock of the scenario `rounds` times."""
    hold, ask = SCENARIOS[scenario]
    asked = finished = 0

    def asker() -> None:
        nonlocal finished
        for _ in range(rounds):
            until(lambda before=finished: asked > before)
            ask()
            finished += 1

    def let_wait() -> None:
        nonlocal asked
        asked += 1
        until(lambda: is_in_futex(thread.native_id or 0))
        time.sleep(held)

    thread = threading.Thread(target=asker, daemon=True)
    thread.start()
    for _ in range(rounds):
        hold(let_wait)
        until(lambda: finished == asked)
    return {"waits": rounds}


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def want_the_interpreter(seconds: float) -> dict[str, int]:
    """Have several threads compute, only one of which can do so at a time."""
    threads = [threading.Thread(target=compute, args=(seconds,)) for _ in range(IN_THE_INTERPRETER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"threads": IN_THE_INTERPRETER}


def main() -> None:
    scenario = sys.argv[1]
    rounds, held = (int(text) for text in (*sys.argv[2:], *("40", "50000")[len(sys.argv) - 2 :]))
    if comm := os.environ.get("LOCKD_COMM"):
        Path("/proc/self/comm").write_text(comm)
    print("ready", os.getpid(), flush=True)
    if not os.read(0, 1):
        sys.exit("the test went away")
    if scenario == "gil":
        truth = want_the_interpreter(rounds * held / 1e6)
    else:
        truth = hand_over(scenario, rounds, held / 1e6)
    print(json.dumps(truth), flush=True)
    os.read(0, 1)


main()
