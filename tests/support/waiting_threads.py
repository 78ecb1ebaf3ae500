"""Threads that wait at this moment, in the sampler's table of threads."""

from __future__ import annotations

import numpy as np

from lockd.columns.table import Table
from lockd.names.labels.processes import Name
from lockd.sample.aggregates.contention import PROGRAMS, ContentionTables


def table_of_threads(*waits: tuple[str, Name, str, int]) -> Table:
    """Return a table of threads: program, process and kind of each, and the ns that it has waited so far."""
    threads = ContentionTables(lambda tgid, tid: "", 1).threads
    names = np.empty(len(waits), object)
    names[:] = [name for _, name, _, _ in waits]
    threads.find_or_add(
        np.arange(1, len(waits) + 1, dtype=np.uint64),
        1.0,
        lambda at: {
            "program": np.array([PROGRAMS.index(program) for program, *_ in waits])[at],
            "process": names[at],
            "kind": np.array([kind for _, _, kind, _ in waits], object)[at],
            "waiting_ns": np.array([waiting_ns for *_, waiting_ns in waits])[at],
        },
    )
    return threads
