"""Profiles for `go tool pprof`, Pyroscope and other tools: gzip-compressed messages of profile.proto.

The field numbers come from https://github.com/google/pprof/blob/main/proto/profile.proto.

Times are in nanoseconds, as in Go's own profiles of waits: every reader shows these as times. The period is
one event, or one sample, that was counted. It must be there, because servers make it a part of the profile's
type, and Pyroscope fails without it.
"""

from __future__ import annotations

import gzip
from dataclasses import replace

from lockd.views.profile import Mark, Profile, Sample, Value, frame_kind

MAPPINGS = {"user": 1, "kernel": 2, "mark": 0}
"""Number of the mapping for each kind of frame. Frames that are no functions have no mapping (0)."""
NANOSECONDS = {"nanoseconds": 1, "microseconds": 1000}
"""The number of nanoseconds in each unit of time."""
MOST = 2**63 - 1
"""The largest value of a sample: pprof has 64 bits with a sign."""


def encode(profile: Profile, comm_is_frame: bool = False) -> bytes:
    """The content of a pprof file.

    Each function is in a mapping `[user]` or `[kernel]`. Samples have the labels `pid`, `tid` and `comm`
    besides their own. With `comm_is_frame` the comm is also the outermost frame of each stack.
    """
    if comm_is_frame:
        samples = [replace(sample, frames=(Mark(sample.comm), *sample.frames)) for sample in profile.samples]
        profile = replace(profile, samples=samples)
    return gzip.compress(_Encoder(profile).message(), 6, mtime=0)


class _Encoder:
    """Encodes one profile. Each string and each function is written once, and has a number."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._strings = {"": 0}
        self._functions: dict[tuple[str, str], int] = {}
        self._scales = [NANOSECONDS.get(value.unit, 1) for value in profile.values]

    def message(self) -> bytes:
        profile = self._profile
        parts = [_bytes(1, self._value_type(value)) for value in profile.values]
        parts += [_bytes(2, self._sample(sample)) for sample in profile.sorted()]
        # Field 7, has_functions: without it pprof would search files for the names of addresses.
        parts += [
            _bytes(3, _int(1, number) + _int(5, self._string(f"[{kind}]")) + _int(7, 1))
            for kind, number in MAPPINGS.items()
            if number
        ]
        for (kind, name), number in self._functions.items():
            line = _int(1, number)
            parts.append(_bytes(4, _int(1, number) + _int(2, MAPPINGS[kind]) + _bytes(4, line)))
            text = self._string(name)
            parts.append(_bytes(5, _int(1, number) + _int(2, text) + _int(3, text)))
        counted = next((value for value in profile.values if value.unit == "count"), profile.values[0])
        parts.append(_bytes(11, self._value_type(counted)))
        numbers = {
            9: round(profile.began * 1e6) * 1000,
            10: round(profile.seconds * 1e9),
            12: 1,
            13: self._string(profile.title),
            14: self._string(_name(profile.values[0])),
        }
        parts += [_bytes(6, _text(string)) for string in self._strings]
        return b"".join([*parts, *(_int(field, number) for field, number in numbers.items())])

    def _value_type(self, value: Value) -> bytes:
        unit = "nanoseconds" if value.unit in NANOSECONDS else value.unit
        return _int(1, self._string(_name(value))) + _int(2, self._string(unit))

    def _sample(self, sample: Sample) -> bytes:
        locations = b"".join(_varint(self._function(frame)) for frame in reversed(sample.frames))
        scaled = (min(value * scale, MOST) for value, scale in zip(sample.values, self._scales, strict=True))
        values = b"".join(map(_varint, scaled))
        texts = {"comm": sample.comm, **sample.labels}
        labels = [(name, _int(2, self._string(text))) for name, text in texts.items()]
        labels += [("pid", _int(3, sample.pid)), ("tid", _int(3, sample.tid))]
        written = [_bytes(3, _int(1, self._string(name)) + value) for name, value in labels if value]
        return b"".join([_bytes(1, locations), _bytes(2, values), *written])

    def _function(self, frame: str) -> int:
        """The number of a function, which is also that of its location."""
        key = frame_kind(frame), str(frame)
        return self._functions.setdefault(key, len(self._functions) + 1)

    def _string(self, text: str) -> int:
        return self._strings.setdefault(str(text), len(self._strings))


def _name(value: Value) -> str:
    """The name of a value in the file. It has no unit that the file does not have."""
    return value.name.removesuffix("_us")


def _varint(number: int) -> bytes:
    """A number as protobuf's varint; a negative one as 64 bits of two's complement."""
    number &= 2**64 - 1
    coded = bytearray()
    while number > 0x7F:
        coded.append(number & 0x7F | 0x80)
        number >>= 7
    coded.append(number)
    return bytes(coded)


def _int(field: int, number: int) -> bytes:
    """A numeric field. The number 0 is left out, as readers take a missing field for 0."""
    return _varint(field << 3) + _varint(number) if number else b""


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(text: str) -> bytes:
    """A string as UTF-8. Bytes of file names and symbols that are no UTF-8 are escaped."""
    return text.encode("utf-8", "backslashreplace")
