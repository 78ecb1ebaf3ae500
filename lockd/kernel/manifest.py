"""What the loader tells the sampler about what it attached: hooks, maps and their layouts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

Layout = dict[str, Any]
"""A C struct as numpy.dtype() takes it: names, formats (nested for structs), offsets, itemsize."""


@dataclass(frozen=True)
class Hook:
    """One place in the kernel that a program wants to be called from."""

    program: str
    hook: str
    mechanism: str
    attached: bool
    reason: str = ""
    """Why not, in words; empty if attached."""


@dataclass(frozen=True)
class Chosen:
    """How one part of a program's work is done."""

    program: str
    what: str
    """`calls`, `switches`, `waits` or `holds`."""
    mechanism: str
    """`tracepoint`, `fentry` or `kprobe`; empty if it cannot be done."""
    instead_of: str
    """Why not by a mechanism that would be preferred, in words; empty if none would."""


@dataclass(frozen=True)
class MapInfo:
    """One BPF map; its descriptor is the one of the same position in the hand-over."""

    name: str
    entries: int
    key: Layout | str
    value: Layout | str


@dataclass(frozen=True)
class Manifest:
    """Sent by the loader, with the descriptors of `maps`, then `functions`, then the attachments."""

    source_hash: str
    """Of everything that was compiled: what may be adopted by a later start."""
    attached_ns: int
    """Monotonic clock, when everything was attached. A wait that began before and is said to have begun then
    has lasted for longer: how long, the kernel did not tell."""
    chosen: tuple[Chosen, ...]
    hooks: tuple[Hook, ...]
    maps: tuple[MapInfo, ...]
    functions: tuple[tuple[str, str], ...]
    """(program, function) of every BPF function loaded."""
    enums: dict[str, tuple[str, ...]]
    """The C enumerations by name. Their members are in order, in lower case, and without the word that all of
    them begin with: KIND_PI of `enum futex_kind` is `pi`."""
    constants: dict[str, int]
    """Plain integer #defines of the programs."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(text: bytes) -> Manifest:
        """Raises ValueError if it is none."""
        try:
            return Manifest._of(json.loads(text))
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no manifest: {error!r}") from None

    @staticmethod
    def _of(raw: dict[str, Any]) -> Manifest:
        return Manifest(
            source_hash=raw["source_hash"],
            attached_ns=raw["attached_ns"],
            chosen=tuple(Chosen(**one) for one in raw["chosen"]),
            hooks=tuple(Hook(**hook) for hook in raw["hooks"]),
            maps=tuple(MapInfo(**one) for one in raw["maps"]),
            functions=tuple((program, name) for program, name in raw["functions"]),
            enums={name: tuple(members) for name, members in raw["enums"].items()},
            constants=raw["constants"],
        )
