"""A reader of pprof files that is independent of lockd's code that writes them."""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterator
from typing import Any


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: the number of each, and its value, an integer or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        else:
            assert tag & 7 == 2, "profile.proto has no other types"
            size = varint()
            yield tag >> 3, message[at : at + size]
            at += size
    assert at == len(message)


def integers(packed: bytes) -> list[int]:
    found, number, shift = [], 0, 0
    for byte in packed:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append(number)
            number = shift = 0
    return found


class Decoded:
    """The content of a file of profile.proto."""

    def __init__(self, data: bytes) -> None:
        self.raw: dict[int, list[Any]] = {}
        """The values of the fields of the message, by number."""
        for number, value in fields(gzip.decompress(data)):
            self.raw.setdefault(number, []).append(value)
        self.strings = [text.decode() for text in self.raw[6]]
        types = [dict(fields(one)) for one in self.raw[1]]
        self.types = [(self.strings[one[1]], self.strings[one[2]]) for one in types]
        """The name and the unit of each value of a sample."""
        self._names = self._locations()
        self.samples = [self._sample(one) for one in self.raw.get(2, [])]
        """The frames (function and mapping, innermost first), the values and the labels of each sample."""

    def _sample(self, message: bytes) -> tuple[list[tuple[str, str]], list[int], dict[str, Any]]:
        found = list(fields(message))
        stack = [self._names[at] for n, v in found if n == 1 for at in integers(v)]
        values = [number for n, v in found if n == 2 for number in integers(v)]
        labels: dict[str, Any] = {}
        for label in (dict(fields(v)) for n, v in found if n == 3):
            labels[self.strings[label[1]]] = self.strings[label[2]] if 2 in label else label[3]
        return stack, values, labels

    def _locations(self) -> dict[int, tuple[str, str]]:
        strings, raw = self.strings, self.raw
        mappings = {(m := dict(fields(one)))[1]: strings[m[5]] for one in raw[3]}
        functions = {(f := dict(fields(one)))[1]: strings[f[2]] for one in raw[5]}
        locations = {}
        for one in raw[4]:
            location = dict(fields(one))
            name = functions[dict(fields(location[4]))[1]]
            locations[location[1]] = name, mappings.get(location.get(2, 0), "")
        return locations

    def within(self, value: str) -> dict[str, int]:
        """Return the sum of this value over all samples in a function and in what it calls, by function."""
        at = [name for name, _ in self.types].index(value)
        sums: dict[str, int] = defaultdict(int)
        for stack, values, _ in self.samples:
            for name in {name for name, _ in stack}:
                sums[name] += values[at]
        return sums
