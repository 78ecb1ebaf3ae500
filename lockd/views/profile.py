"""Profiles: stacks with the values that were measured at each, by a trace or by the daemon.

A profile does not depend on the format in which it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockd.printable import printable


class KernelFrame(str):
    """A frame of a sample that is a function of the kernel."""

    __slots__ = ()


class Mark(str):
    """A frame of a sample that is no function, such as `--` between two stacks, or `[stack lost]`."""

    __slots__ = ()


def frame_kind(frame: str) -> str:
    """`kernel` for a KernelFrame, `mark` for a Mark, and `user` for any other frame."""
    return "kernel" if isinstance(frame, KernelFrame) else "mark" if isinstance(frame, Mark) else "user"


@dataclass(frozen=True)
class Sample:
    """The values at one stack: of one thread, of all threads of a process, or of processes of one name."""

    comm: str
    pid: int
    """The process id (tgid); 0 for several processes."""
    tid: int
    """The thread id; 0 for several threads."""
    frames: tuple[str, ...]
    """The stack, outermost frame first: user space, then the kernel's frames, which are KernelFrame."""
    values: tuple[int, ...]
    """The values in the order of Profile.values."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further facts, such as the name of a lock, for formats that can hold them."""


@dataclass(frozen=True)
class Value:
    """What one value of a sample measures."""

    name: str
    unit: str
    """`microseconds`, `nanoseconds` or `count`."""
    is_maximum: bool = False
    """Whether merged samples have the largest value instead of the sum."""


@dataclass
class Profile:
    """Samples of one measurement. Formats with room for only one value show the first of `values`."""

    title: str
    values: tuple[Value, ...]
    samples: list[Sample] = field(default_factory=list)
    began: float = 0.0
    """The beginning of the measurement, in seconds since 1970."""
    seconds: float = 0.0
    """How long the measurement took."""

    def sorted(self) -> Sequence[Sample]:
        """The samples with printable names, in ascending order of their first values.

        bcc's tools print stacks in this order. Samples of one thread with the same frames and labels are
        merged.
        """
        merged: dict[tuple[object, ...], Sample] = {}
        for sample in self.samples:
            shown = replace(sample, comm=printable(sample.comm), frames=tuple(map(printable, sample.frames)))
            kinds = tuple(map(frame_kind, shown.frames))
            key = shown.comm, shown.pid, shown.tid, shown.frames, kinds, tuple(sorted(shown.labels.items()))
            other = merged.get(key)
            merged[key] = replace(shown, values=self._merged_values(shown, other)) if other else shown
        return sorted(
            merged.values(), key=lambda sample: (sample.values[0], sample.comm, sample.frames, sample.tid)
        )

    def _merged_values(self, sample: Sample, other: Sample) -> tuple[int, ...]:
        pairs = zip(self.values, sample.values, other.values, strict=True)
        return tuple(max(a, b) if value.is_maximum else a + b for value, a, b in pairs)
