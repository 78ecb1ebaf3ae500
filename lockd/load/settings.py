"""What the loader is asked for: the part of the configuration that is compiled in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


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

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(text: bytes) -> LoadSettings:
        raw = json.loads(text)
        raw["programs"] = tuple(raw["programs"])
        raw["mechanisms"] = tuple((program, mechanism) for program, mechanism in raw["mechanisms"])
        return LoadSettings(**raw)
