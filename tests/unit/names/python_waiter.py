"""A Python program whose threads wait for something for ever. Any Python from 3.8 on can run it.

In `python_waiter.py waits`, each thread waits for something else; in `python_waiter.py gil`, one wants the
interpreter and another keeps it. The comm of a thread says what it does. The program prints `ready` when it
is set up. `waits` ends with its standard input, `gil` with its parent.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

lock, second_lock, recursive_lock = threading.Lock(), threading.Lock(), threading.RLock()
condition, taken_back = threading.Condition(), threading.Condition()
event, semaphore = threading.Event(), threading.Semaphore(0)
work: queue.Queue[int] = queue.Queue()
full: queue.Queue[int] = queue.Queue(1)
simple: queue.SimpleQueue[int] = queue.SimpleQueue()
pool = ThreadPoolExecutor(1, initializer=lambda: call_myself("pool"))
endless = threading.Thread(target=event.wait, daemon=True)


class Registry:
    def with_lock(self) -> None:
        with lock:
            pass

    def acquire(self) -> None:
        second_lock.acquire()

    def with_rlock(self) -> None:
        with recursive_lock:
            pass

    def wait(self) -> None:
        with condition:
            condition.wait()

    def wait_event(self) -> None:
        event.wait()

    def get(self) -> None:
        work.get()

    def put(self) -> None:
        full.put(1)

    def get_simple(self) -> None:
        simple.get()

    def semaphore(self) -> None:
        semaphore.acquire()

    def join(self) -> None:
        endless.join()

    def take_back(self) -> None:
        with taken_back:
            taken_back.wait()


METHODS = [name for name in vars(Registry) if not name.startswith("_")]


def call_myself(name: str) -> None:
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def run(name: str) -> None:
    call_myself(name)
    getattr(Registry(), name)()


def call_of(tid: int) -> str:
    return Path(f"/proc/self/task/{tid}/syscall").read_text()


def wait_for_all() -> None:
    lock.acquire()
    second_lock.acquire()
    recursive_lock.acquire()
    full.put(1)
    endless.start()
    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in METHODS}
    for thread in threads.values():
        thread.start()
    pool.submit(int).result()
    waiters: Any = taken_back
    while not waiters._waiters:
        time.sleep(0.001)
    waits = [threads["take_back"]]
    before = calls_for_ever(waits)
    taken_back.acquire()
    taken_back.notify_all()
    while calls_for_ever(waits) == before:
        time.sleep(0.001)
    calls_for_ever([*threads.values(), *pool._threads])


def calls_for_ever(waits: Iterable[threading.Thread]) -> list[str]:
    """Return the system calls that these threads are in, once each is in a futex call without a time limit.

    A thread that waits for the interpreter has a time limit.
    """
    while True:
        calls = [call_of(thread.native_id or 0) for thread in waits]
        if all(len(words := call.split()) > 4 and words[4] == "0x0" for call in calls):
            return calls
        time.sleep(0.001)


def want_the_interpreter() -> None:
    call_myself("gil")
    while True:
        pass


def keep_the_interpreter() -> None:
    threading.Thread(target=want_the_interpreter, daemon=True).start()
    print("ready", flush=True)
    library = ctypes.PyDLL(None)
    parent = os.getppid()
    while os.getppid() == parent:
        library.usleep(500_000)


if sys.argv[1] == "gil":
    keep_the_interpreter()
else:
    wait_for_all()
    print("ready", flush=True)
    os.read(0, 1)
os._exit(0)
