"""What compiling gives, as a plain value: maps to be made, and the code of every function."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from lockd.kernel.manifest import Layout

LOAD_IMMEDIATE, PSEUDO_MAP_FD = 0x18, 1
"""The operation, in the first byte of an instruction, and the kind of its constant, in the high half of
the second. The constant, here a map, is in bytes 4 to 7; the operation takes two instructions."""


@dataclass(frozen=True)
class MapDefinition:
    """One map, as BPF_MAP_CREATE takes it, and what is in it."""

    name: str
    type: int
    key_size: int
    value_size: int
    entries: int
    flags: int
    inner: str
    """Of an array of maps: the map that its elements are like; else empty."""
    key_type: int
    value_type: int
    """Numbers of the types in Compiled.btf; 0: not in there."""
    key: Layout | str
    value: Layout | str


@dataclass(frozen=True)
class Compiled:
    """A compiled translation unit, of nothing that is open."""

    maps: tuple[MapDefinition, ...]
    functions: dict[str, bytes]
    """Code by name; what loads the descriptor of a map has its position in `maps` instead."""
    btf: bytes
    """Types of the maps' keys and values, in the kernel's format; may be empty."""

    def to_json(self) -> bytes:
        raw = asdict(self)
        raw["functions"] = {name: code.hex() for name, code in self.functions.items()}
        raw["btf"] = self.btf.hex()
        return json.dumps(raw).encode()

    @staticmethod
    def from_json(text: bytes) -> Compiled:
        """Raises ValueError if it is none."""
        try:
            raw = json.loads(text)
            return Compiled(
                maps=tuple(MapDefinition(**one) for one in raw["maps"]),
                functions={name: bytes.fromhex(code) for name, code in raw["functions"].items()},
                btf=bytes.fromhex(raw["btf"]),
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"nothing that was compiled: {error!r}") from None


def with_maps(code: bytes, maps: dict[int, int]) -> bytes:
    """`code` with the maps that it refers to replaced: descriptors by positions, or back."""
    new = bytearray(code)
    for at in _map_loads(code):
        new[at : at + 4] = maps[int.from_bytes(code[at : at + 4], "little")].to_bytes(4, "little")
    return bytes(new)


def _map_loads(code: bytes) -> Iterator[int]:
    """Where the constants are that stand for maps."""
    at = 0
    while at < len(code):
        if code[at] == LOAD_IMMEDIATE:
            if code[at + 1] >> 4 == PSEUDO_MAP_FD:
                yield at + 4
            at += 8
        at += 8
