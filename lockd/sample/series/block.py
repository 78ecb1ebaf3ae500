"""The block that answers a scrape: metrics are added one by one, and packed in the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd import messages

US_PER_SECOND = 1e6


class Block:
    """The metrics of one scrape.

    `buckets_us` are the upper edges of the exported buckets, in microseconds. `slots` is the number of
    histogram slots in which the programs count. `exporters_seconds` is the CPU time of exporters that have
    ended; the running exporter adds its own.
    """

    def __init__(self, buckets_us: Sequence[int], slots: int, exporters_seconds: float = 0.0) -> None:
        self._head: dict[str, Any] = {
            "metrics": [],
            "buckets": [us / US_PER_SECOND for us in buckets_us],
            "cpu_seconds_before": exporters_seconds,
        }
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        # Slot i ends at 2^i us; the last has no end.
        ends = 2.0 ** np.arange(slots)
        ends[-1] = np.inf
        bucket_of = np.searchsorted(np.array(buckets_us, np.float64), ends)
        self._fold = np.zeros((slots, len(buckets_us) + 1), np.int64)
        self._fold[np.arange(slots), bucket_of] = 1

    def add(self, name: str, labels: Sequence[Sequence[str]], values: npt.ArrayLike) -> None:
        """Add a counter or gauge: one value for each label set. A label set is the label values in order."""
        self._head["metrics"].append({"name": name, "labels": labels})
        self._arrays[name] = np.ascontiguousarray(values, np.float64)

    def add_histogram(
        self,
        name: str,
        labels: Sequence[Sequence[str]],
        slots: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.float64],
    ) -> None:
        """Add a histogram: one row of slots (not cumulative) and one sum, in seconds, for each label set."""
        self._head["metrics"].append({"name": name, "labels": labels})
        self._arrays[f"{name}.buckets"] = np.ascontiguousarray(slots @ self._fold)
        self._arrays[f"{name}.sum"] = seconds

    def pack(self) -> bytes:
        return messages.pack(self._head, self._arrays)


def with_windows(
    labels: Sequence[tuple[str, ...]], maxima: dict[str, npt.NDArray[np.int64]]
) -> tuple[list[tuple[str, ...]], npt.NDArray[np.float64]]:
    """Return every label set with each window as a further label, and the maximum of each in microseconds.

    `maxima` are in nanoseconds: by window, one for each of `labels`.
    """
    rows = [(*label, window) for window in maxima for label in labels]
    values = np.concatenate(list(maxima.values())) if maxima else np.empty(0)
    return rows, values / 1000.0
