"""Threads of Python sleep all the time in three functions, in turns of random length.

`sleeps.py THREADS SECONDS`, with the protocol of README.md. The truth is how long threads were in each
function, in microseconds.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path


def sleep_briefly() -> None:
    time.sleep(random.uniform(0.002, 0.006))


def sleep_for_a_while() -> None:
    time.sleep(random.uniform(0.006, 0.010))


def sleep_for_long() -> None:
    time.sleep(random.uniform(0.010, 0.030))


def sleep_by_turns(end: float, slept: dict[str, float]) -> None:
    while (begin := time.monotonic()) < end:
        function = random.choice((sleep_briefly, sleep_for_a_while, sleep_for_long))
        function()
        slept[function.__name__] = slept.get(function.__name__, 0.0) + time.monotonic() - begin


def main() -> None:
    threads, seconds = int(sys.argv[1]), float(sys.argv[2])
    if comm := os.environ.get("LOCKD_COMM"):
        Path("/proc/self/comm").write_text(comm)
    print("ready", os.getpid(), flush=True)
    if not os.read(0, 1):
        sys.exit("the test went away")
    slept: list[dict[str, float]] = [{} for _ in range(threads)]
    end = time.monotonic() + seconds
    sleepers = [threading.Thread(target=sleep_by_turns, args=(end, own)) for own in slept]
    for sleeper in sleepers:
        sleeper.start()
    for sleeper in sleepers:
        sleeper.join()
    functions = {function for own in slept for function in own}
    truth = {function: sum(own.get(function, 0.0) for own in slept) for function in functions}
    print(json.dumps({function: round(1e6 * seconds) for function, seconds in truth.items()}), flush=True)
    os.read(0, 1)


main()
