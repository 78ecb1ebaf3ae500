"""The loader's settings: what the configuration, or the options of a trace, say about programs and maps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockd.load.hooks import Candidate, Part, Way

SYSFS = Path("/sys")


def possible_cpus(sysfs: Path = SYSFS) -> int:
    """How many processors the machine can have; per-CPU maps have a value for each."""
    ranges = (sysfs / "devices/system/cpu/possible").read_text().strip().split(",")
    ends = [[int(end) for end in each.split("-")] for each in ranges]
    return sum(each[-1] - each[0] + 1 for each in ends)


@dataclass(frozen=True)
class Trace:
    """Parts of the work, files, macros and maps that a one-shot tool needs besides those of the programs."""

    parts: tuple[Part, ...] = ()
    files: tuple[str, ...] = ()
    """Files of lockd/bpf that come before those of all parts."""
    defines: dict[str, int | None] = field(default_factory=dict)
    """Values of macros for all files, by name (see lockd/bpf/include/trace.bpf.h). A macro with the value
    None is defined as empty."""
    pairs: tuple[str, ...] = ()
    """Names of the pairs that are handed over."""
    maps: tuple[str, ...] = ()
    """Names of the single maps that are handed over."""


@dataclass(frozen=True)
class LoadSettings:
    """Settings that the loader process receives on its standard input, as JSON."""

    programs: tuple[str, ...]
    """The enabled programs, out of `futex`, `offcpu` and `kernel_locks`."""
    entries: int
    """Entries that the map of each program has room for in one window."""
    threads: int
    """Largest number of threads that are followed at one time."""
    stacks: int
    """Largest number of call stacks in one window."""
    min_block_ns: int
    """Waits shorter than this, in nanoseconds, are not counted. Holds of kernel locks always are."""
    max_block_ns: int
    """Waits longer than this, in nanoseconds, are not counted. Holds of kernel locks always are."""
    lock_mode: str
    """The mode of kernel locks: `contention` or `all`."""
    futex_mode: str
    """The mode of the futex program: `blocked` or `calls`."""
    mechanisms: tuple[tuple[str, str], ...]
    """(program, mechanism) pairs; a mechanism is `auto`, `tracepoint`, `fentry` or `kprobe`."""
    has_holders: bool = False
    """Whether the holders of locks are sampled."""
    has_wait_samples: bool = False
    """Whether waits off the CPU are sampled, with their stacks."""
    trace: Trace | None = None
    """What a one-shot tool needs besides; None for the daemon."""
    cpus: int = field(default_factory=possible_cpus)
    """How many processors the machine can have."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(text: bytes) -> LoadSettings:
        raw = json.loads(text)
        raw["programs"] = tuple(raw["programs"])
        raw["mechanisms"] = tuple((program, mechanism) for program, mechanism in raw["mechanisms"])
        if raw["trace"]:
            raw["trace"] = _trace(raw["trace"])
        return LoadSettings(**raw)


def _trace(raw: dict[str, Any]) -> Trace:
    parts = tuple(Part(**{**_tuples(part), "ways": tuple(map(_way, part["ways"]))}) for part in raw["parts"])
    return Trace(**{**_tuples(raw), "parts": parts})


def _way(raw: dict[str, Any]) -> Way:
    return Way(**{**_tuples(raw), "hooks": tuple(Candidate(**_tuples(hook)) for hook in raw["hooks"])})


def _tuples(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
