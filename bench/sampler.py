"""What a tick costs by the number of entries that it finds: `sudo .venv/bin/python bench/sampler.py`.

Real maps are filled with entries that no window had before, of threads of COMMS processes, and a real sampler
drains and folds them. Prints a Markdown table: milliseconds, medians of ROUNDS.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lockd.children import run_loader  # noqa: E402
from lockd.config import Config  # noqa: E402
from lockd.config_reader import read_text  # noqa: E402
from lockd.daemon import sampler_settings  # noqa: E402
from lockd.libbpf import libbpf  # noqa: E402
from lockd.sample.maps import HashMap  # noqa: E402
from lockd.sample.sampler import Sampler  # noqa: E402
from lockd.service import load_settings  # noqa: E402

ENTRIES = (0, 1000, 10_000, 16_000)
ROUNDS = 15
COMMS = 50
SETTLE_SECONDS = 0.3


class Filler:
    """Writes entries of futex waits that blocked into the map that the next tick drains."""

    def __init__(self, table: HashMap) -> None:
        self._table = table
        self._made = 0

    def fill(self, count: int, known: bool) -> None:
        """`known`: the same keys as the last time."""
        keys, values = np.zeros(count, self._table.key), np.zeros(count, self._table.value)
        numbers = np.arange(count) + (0 if known else self._made)
        self._made += 0 if known else count
        keys["tid"], keys["uaddr"] = numbers % 1_000_000 + 5_000_000, numbers * 64 + (1 << 40)
        keys["slot"] = numbers % 20
        values["calls"], values["blocked_ns"], values["max_blocked_ns"] = 1, 5000, 5000
        who = values["who"]
        who["tgid"] = 4_000_000 + numbers % COMMS
        who["comm"] = [b"filled-%d" % (number % COMMS) for number in numbers]
        number = ctypes.c_uint32(count)
        update = libbpf().bpf_map_update_batch
        rows = ctypes.c_void_p(keys.ctypes.data), ctypes.c_void_p(values.ctypes.data)
        if count and update(self._table.fd, *rows, ctypes.byref(number), None):
            raise OSError(ctypes.get_errno(), "filling the map")


def timed(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    programs = {"offcpu": {"enabled": False}, "kernel_locks": {"enabled": False}}
    # Events of this host are left out, as far as one can: the entries are of no process that lives.
    asked = {
        "programs": programs,
        "filter": {"comms": ["filled-*"]},
        "maps": {"entries": 1 << 14},
        "budget": {"cpu": None},
    }
    config = read_text(Config, json.dumps(asked), "bench")
    manifest, fds = run_loader(load_settings(config))
    for fd in fds[len(manifest.maps) + len(manifest.functions) :]:
        os.close(fd)  # nothing is attached any more
    sampler = Sampler(manifest, fds, sampler_settings(config))
    maps = sampler._collector._maps
    filler = Filler(maps.pairs["futex"][0])
    print("| entries | drain | fold | fold of known keys |\n|---:|---:|---:|---:|")
    for count in ENTRIES:
        drains, folds, again = [], [], []
        for _ in range(ROUNDS):
            for known, times in ((False, folds), (True, again)):
                while maps._control.window != 1:
                    sampler.tick()
                    time.sleep(SETTLE_SECONDS)
                sampler.fold()
                filler.fill(count, known)
                time.sleep(SETTLE_SECONDS)
                drains.append(timed(sampler._collector.collect))
                times.append(timed(sampler.fold))
        print(
            f"| {count:,} | "
            + " | ".join(f"{statistics.median(each):.2f}" for each in (drains, folds, again))
            + " |"
        )
    sampler.close()


if __name__ == "__main__":
    main()
