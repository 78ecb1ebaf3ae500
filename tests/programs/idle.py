"""An idle Python program: an executor that has had some tasks, and threads that wait for work in queues.

Some locks of the idle threads are in memory where there were other locks before, for which threads waited
shortly.

`idle.py HELD_US [STUCK]`, with the protocol of README.md. From its truth on the program stays idle, and in
the end it gives the threads work. STUCK more threads are stuck in a lock, in memory where they waited for an
event before.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FUTEX = {"x86_64": "202", "aarch64": "98"}
IDLE = 4
"""The number of idle threads of each sort."""
TASK_SECONDS, SETTLED_SECONDS = 0.02, 0.5

work: queue.Queue[int] = queue.Queue()


def futex_of(tid: int) -> str:
    """Return the address of the futex that a thread waits for, once it waits."""
    while True:
        call = Path(f"/proc/self/task/{tid}/syscall").read_text().split()
        if call[0] == FUTEX[os.uname().machine]:
            return call[1]
        time.sleep(50e-6)


def wait_shortly(held: float) -> str:
    """Wait for a lock that is gone afterwards. Return the address of its futex."""
    lock, found = threading.Lock(), ""

    def release() -> None:
        nonlocal found
        found = futex_of(waiter)
        time.sleep(held)
        lock.release()

    waiter = threading.get_native_id()
    lock.acquire()
    threading.Thread(target=release).start()
    lock.acquire()
    return found


def start(target: object, *arguments: object) -> int:
    thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread.native_id or 0


def get_simple(simple: queue.SimpleQueue[int]) -> None:
    simple.get()


def get_work(held: float, used: set[str]) -> None:
    used.add(wait_shortly(held))
    work.get()


def be_stuck(held: float) -> None:
    threading.Event().wait(held)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def be_idle(held: float, stuck: int) -> tuple[ThreadPoolExecutor, queue.SimpleQueue[int]]:
    """Become idle. Print how many threads are idle, and how many of them wait at an address where others
    waited before.
    """
    used = {wait_shortly(held)}
    simple: queue.SimpleQueue[int] = queue.SimpleQueue()
    used.add(wait_shortly(held))
    pool = ThreadPoolExecutor(IDLE)
    list(pool.map(time.sleep, [TASK_SECONDS] * 2 * IDLE))
    tids = [start(get_simple, simple) for _ in range(IDLE)]
    tids += [start(get_work, held, used) for _ in range(IDLE)]
    tids += [thread.native_id or 0 for thread in pool._threads]
    for _ in range(stuck):
        start(be_stuck, held)
    time.sleep(held + SETTLED_SECONDS)
    reused = sum(futex_of(tid) in used for tid in tids)
    print(json.dumps({"idle": len(tids), "reused": reused}), flush=True)
    return pool, simple


def main() -> None:
    if comm := os.environ.get("LOCKD_COMM"):
        Path("/proc/self/comm").write_text(comm)
    print("ready", os.getpid(), flush=True)
    if not os.read(0, 1):
        sys.exit("the test went away")
    pool, simple = be_idle(int(sys.argv[1]) / 1e6, int((*sys.argv[2:], "0")[0]))
    os.read(0, 1)
    for _ in range(IDLE):
        simple.put(1)
        work.put(1)
    pool.shutdown()
    time.sleep(SETTLED_SECONDS)
    os._exit(0)


main()
