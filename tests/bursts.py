"""Takes a third of every processor away in bursts until it is ended, to show which tests fail on a busy host.

Usage: python3 -m tests.bursts [SHARE]        (root; SHARE is 0.33 by default)

A burst lasts 20 to 400 ms and has a real-time priority. Nothing else runs on that processor meanwhile, just
as when a hypervisor gives it to another guest.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

LEAST, MOST = 0.02, 0.4
"""The shortest and the longest burst, in seconds."""


def burst(processor: int, share: float) -> None:
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while True:
        seconds = random.uniform(LEAST, MOST)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        time.sleep(seconds * (1 - share) / share)


def main() -> None:
    share = float(sys.argv[1]) if len(sys.argv) > 1 else 0.33
    if not 0 < share < 1:
        sys.exit(f"tests.bursts: SHARE {share:g}; rule: more than 0 and less than 1")
    children = []
    for processor in sorted(os.sched_getaffinity(0)):
        if child := os.fork():
            children.append(child)
        else:
            burst(processor, share)
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
