"""The manifest: what the loader attached, and the layouts of the maps that it hands over."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

Layout = dict[str, Any]
"""A C struct as numpy.dtype() takes it: names, formats (nested for structs), offsets, itemsize."""


@dataclass(frozen=True)
class Hook:
    """A place in the kernel, or in an executable file, from which lockd wants a BPF program to be called."""

    program: str
    hook: str
    mechanism: str
    attached: bool
    reason: str = ""
    """Why the hook is not attached, for people to read; empty if it is attached."""


@dataclass(frozen=True)
class Chosen:
    """The mechanism that was chosen for one part of a program's work."""

    program: str
    what: str
    """The part: `calls`, `switches`, `waits`, `holds` or `holders`. One-shot tools have other parts too."""
    mechanism: str
    """`tracepoint`, `fentry` or `kprobe`, in one-shot tools also `uprobe`. Empty if this host cannot do the
    part by a mechanism that the configuration allows."""
    instead_of: str
    """Why mechanisms preferred to this one were not chosen, for people to read; empty if there are none."""


@dataclass(frozen=True)
class MapInfo:
    """A BPF map. The loader hands over the descriptors of the maps in the order of Manifest.maps."""

    name: str
    entries: int
    """Largest number of entries."""
    key: Layout | str
    value: Layout | str


@dataclass(frozen=True)
class Manifest:
    """What the loader sends to the process that started it, along with the descriptors of `maps`, of
    `functions` and of the attachments, in this order."""

    attached_ns: int
    """Time on the monotonic clock at which everything was attached, in nanoseconds. A wait that began
    before may be recorded as begun at this time, because the kernel did not tell how long it had lasted."""
    chosen: tuple[Chosen, ...]
    hooks: tuple[Hook, ...]
    maps: tuple[MapInfo, ...]
    functions: tuple[tuple[str, str], ...]
    """(program, function) of every BPF function that was loaded."""
    enums: dict[str, tuple[str, ...]]
    """The members of each C enumeration in order, in lower case, without the prefix that all of them share:
    KIND_PI of `enum futex_kind` is `pi`."""
    constants: dict[str, int]
    """The integer #defines of the BPF programs."""

    @property
    def counts_futex_calls(self) -> bool:
        """Whether every futex call is counted. Otherwise only the waits that blocked are counted."""
        return any(part.program == "futex" and part.what == "calls" for part in self.chosen)

    def has_map(self, name: str) -> bool:
        """Whether the programs have a map of this name."""
        return any(info.name == name for info in self.maps)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(text: bytes) -> Manifest:
        """Return the manifest that to_json() has encoded. Raises ValueError if the text is not a manifest."""
        try:
            return Manifest._from_raw(json.loads(text))
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no manifest: {error!r}") from None

    @staticmethod
    def _from_raw(raw: dict[str, Any]) -> Manifest:
        return Manifest(
            attached_ns=raw["attached_ns"],
            chosen=tuple(Chosen(**part) for part in raw["chosen"]),
            hooks=tuple(Hook(**hook) for hook in raw["hooks"]),
            maps=tuple(MapInfo(**info) for info in raw["maps"]),
            functions=tuple((program, name) for program, name in raw["functions"]),
            enums={name: tuple(members) for name, members in raw["enums"].items()},
            constants=raw["constants"],
        )
