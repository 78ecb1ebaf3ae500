"""What the loader is asked for: what of the configuration, or of a trace's options, is compiled in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from lockd.load.hooks import Candidate, Part, Way


@dataclass(frozen=True)
class Trace:
    """What a one-shot tool has compiled besides the programs, and with which switches."""

    parts: tuple[Part, ...] = ()
    files: tuple[str, ...] = ()
    """Of lockd/bpf, before those of any part."""
    defines: dict[str, int | None] = field(default_factory=dict)
    """For all files; see lockd/bpf/include/trace.bpf.h."""
    pairs: tuple[str, ...] = ()
    """Pairs of maps to be handed over, besides those of the programs."""
    maps: tuple[str, ...] = ()
    """The same of single maps."""


@dataclass(frozen=True)
class LoadSettings:
    """Sent to the loader process on its standard input, as JSON."""

    programs: tuple[str, ...]
    """Of `futex`, `offcpu`, `kernel_locks`."""
    entries: int
    """Keys of one window, for each aggregate."""
    threads: int
    """Threads followed at a time."""
    stacks: int
    """Stacks kept in one window."""
    min_block_ns: int
    max_block_ns: int
    """Shorter and longer waits are not counted as such; holds of kernel locks always are."""
    lock_mode: str
    """Of kernel locks: `contention` or `all`."""
    mechanisms: tuple[tuple[str, str], ...]
    """For each of `programs` (program, mechanism): `auto`, `tracepoint`, `fentry` or `kprobe`."""
    trace: Trace | None = None
    """None for the daemon."""

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
