"""A writer of blocks of Prometheus' storage; the samples do not pass through Prometheus.

A week of 1,000 hosts has billions of samples. promtool reads samples as text and would take hours. Here
many series share the values of one Pattern. The chunks of a pattern are encoded once and copied for each
series. A block is thus written as fast as the disk allows, and queries read as many samples as those of a
real fleet. The format is described at https://github.com/prometheus/prometheus/tree/main/tsdb/docs/format.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

CHUNK_SAMPLES = 120
"""The number of samples of a full chunk of Prometheus."""
SEGMENT_BYTES = 500 << 20
XOR = b"\x01"
CASTAGNOLI = 0x82F63B78
ALL_ONES = 0xFFFFFFFF

Labels = tuple[tuple[str, str], ...]
"""The labels of a series as pairs of name and value, sorted by name."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """The values that series share: one every `step` milliseconds."""

    step: int
    values: Sequence[float]


def write(
    directory: Path, series: Mapping[Labels, Pattern], begin: int, milliseconds: int, count: int
) -> dict[str, int]:
    """Write `count` blocks, each `milliseconds` long, into a data directory of Prometheus.

    All patterns start at `begin`, in milliseconds since 1970. The result has the numbers of series, samples
    and bytes.
    """
    ordered = sorted(series)
    patterns = [series[labels] for labels in ordered]
    samples = 0
    for number in range(count):
        block = directory / f"{number + 1:026}"
        samples += _write_block(block, ordered, patterns, number, begin + number * milliseconds, milliseconds)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return {"series": len(ordered), "samples": samples, "bytes": size}


def _write_block(
    block: Path, ordered: Sequence[Labels], patterns: Sequence[Pattern], number: int, start: int, length: int
) -> int:
    (block / "chunks").mkdir(parents=True)
    encoded = {pattern: _encode(pattern, number, start, length) for pattern in set(patterns)}
    chunks = [encoded[pattern] for pattern in patterns]
    with (block / "index").open("wb") as file:
        _Index(file).write(ordered, _stored(block, chunks))
    stats = {
        "numSamples": sum(one.samples for one in chunks),
        "numSeries": len(ordered),
        "numChunks": sum(one.count for one in chunks),
    }
    meta = {
        "ulid": block.name,
        "minTime": start,
        "maxTime": start + length,
        "stats": stats,
        "compaction": {"level": 1, "sources": [block.name]},
        "version": 1,
    }
    (block / "meta.json").write_text(json.dumps(meta))
    return stats["numSamples"]


def _encode(pattern: Pattern, number: int, start: int, length: int) -> _Chunks:
    """The chunks of the part of a pattern that belongs to the block of this `number`."""
    many = length // pattern.step
    return _Chunks.of(start, pattern.step, pattern.values[number * many : (number + 1) * many])


def _stored(block: Path, chunks: Iterable[_Chunks]) -> Iterator[tuple[int, _Chunks]]:
    """Write the chunks of each series, and yield the place of the first one."""
    segment = 0
    file: BinaryIO | None = None
    try:
        for one in chunks:
            if file is None or file.tell() > SEGMENT_BYTES:
                if file is not None:
                    file.close()
                segment += 1
                file = (block / "chunks" / f"{segment:06}").open("wb")
                file.write(struct.pack(">IB3x", 0x85BD40DD, 1))
            yield (segment - 1) << 32 | file.tell(), one
            file.write(one.content)
    finally:
        if file is not None:
            file.close()


@dataclass(frozen=True)
class _Chunks:
    """The encoded chunks of one series in one block."""

    content: bytes
    count: int
    samples: int
    before: bytes
    """The part of the index entry from the number of chunks up to the place of the first chunk."""
    after: _Tail
    """The part of the index entry after that place. It does not depend on the place."""

    @staticmethod
    def of(start: int, step: int, values: Sequence[float]) -> _Chunks:
        parts, spans = [], []
        for first in range(0, len(values), CHUNK_SAMPLES):
            some = values[first : first + CHUNK_SAMPLES]
            begin = start + first * step
            data = _xor(begin, step, some)
            parts.append(_uvarint(len(data)) + XOR + data + struct.pack(">I", crc32c(XOR + data)))
            spans.append((begin, begin + (len(some) - 1) * step))
        before = _uvarint(len(parts)) + _varint(spans[0][0]) + _uvarint(spans[0][1] - spans[0][0])
        after = b"".join(
            _uvarint(begin - last_end) + _uvarint(end - begin) + _varint(len(part))
            for (_, last_end), (begin, end), part in zip(spans, spans[1:], parts, strict=False)
        )
        return _Chunks(b"".join(parts), len(parts), len(values), before, _Tail(after))


class _Index:
    """The index of a block: the symbols, the series, and for each label the series that have it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, ordered: Sequence[Labels], stored: Iterator[tuple[int, _Chunks]]) -> None:
        file = self._file
        file.write(struct.pack(">IB", 0xBAAAD700, 2))
        symbols = sorted({text.encode() for labels in ordered for pair in labels for text in pair})
        numbers = {symbol.decode(): _uvarint(number) for number, symbol in enumerate(symbols)}
        at = {"symbols": file.tell()}
        self._section(struct.pack(">I", len(symbols)) + b"".join(_uvarint(len(s)) + s for s in symbols))
        self._align(16)
        at["series"] = file.tell()
        postings: dict[tuple[str, str], array[int]] = defaultdict(lambda: array("I"))
        for labels, (place, chunks) in zip(ordered, stored, strict=True):
            self._align(16)
            reference = file.tell() // 16
            postings["", ""].append(reference)
            for pair in labels:
                postings[pair].append(reference)
            self._entry(
                b"".join(numbers[text] for pair in labels for text in pair), len(labels), place, chunks
            )
        at["postings"] = file.tell()
        offsets = {}
        for pair in sorted(postings):
            self._align(4)
            offsets[pair] = file.tell()
            references = postings[pair]
            references.byteswap()
            self._section(struct.pack(">I", len(references)) + references.tobytes())
        at["table"] = file.tell()
        entries = (
            b"\x02" + b"".join(_uvarint(len(t.encode())) + t.encode() for t in pair) + _uvarint(offset)
            for pair, offset in offsets.items()
        )
        self._section(struct.pack(">I", len(offsets)) + b"".join(entries))
        # The index of label names is left out: readers of version 2 do not use it.
        contents = struct.pack(">6Q", at["symbols"], at["series"], 0, 0, at["postings"], at["table"])
        file.write(contents + struct.pack(">I", crc32c(contents)))

    def _entry(self, symbols: bytes, labels: int, place: int, chunks: _Chunks) -> None:
        head = _uvarint(labels) + symbols + chunks.before + _uvarint(place)
        content = head + chunks.after.content
        checksum = struct.pack(">I", chunks.after.checksum(head))
        self._file.write(_uvarint(len(content)) + content + checksum)

    def _section(self, content: bytes) -> None:
        self._file.write(struct.pack(">I", len(content)) + content + struct.pack(">I", crc32c(content)))

    def _align(self, to: int) -> None:
        self._file.write(bytes(-self._file.tell() % to))


def _xor(start: int, step: int, values: Sequence[float]) -> bytes:
    """Samples at regular times in the XOR encoding of Prometheus: each value is XORed with the one before."""
    bits = [int.from_bytes(struct.pack(">d", value), "big") for value in values]
    head = struct.pack(">H", len(bits)) + _varint(start) + bits[0].to_bytes(8, "big")
    if len(bits) == 1:
        return head
    head += _uvarint(step)
    coded = length = 0
    leading, trailing = 64, 0
    for number, (last, value) in enumerate(pairwise(bits)):
        if number:  # the timestamp: the interval is the same as the one before
            coded, length = coded << 1, length + 1
        difference = last ^ value
        if not difference:
            coded, length = coded << 1, length + 1
            continue
        before = min(64 - difference.bit_length(), 31)
        after = (difference & -difference).bit_length() - 1
        if before >= leading and after >= trailing:
            size = 64 - leading - trailing
            coded, length = (coded << 2 | 0b10) << size | difference >> trailing, length + 2 + size
        else:
            leading, trailing = before, after
            size = 64 - leading - trailing
            sizes = 0b11 << 11 | leading << 6 | size & 63
            coded, length = (coded << 13 | sizes) << size | difference >> trailing, length + 13 + size
    padding = -length % 8
    return head + (coded << padding).to_bytes((length + padding) // 8, "big")


def _uvarint(number: int) -> bytes:
    coded = bytearray()
    while number > 0x7F:
        coded.append(number & 0x7F | 0x80)
        number >>= 7
    coded.append(number)
    return bytes(coded)


def _varint(number: int) -> bytes:
    return _uvarint(number << 1 if number >= 0 else (-number << 1) - 1)


def _reflected(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (CASTAGNOLI if byte & 1 else 0)
    return byte


TABLE = tuple(map(_reflected, range(256)))


def _advanced(state: int, content: bytes) -> int:
    for byte in content:
        state = TABLE[(state ^ byte) & 0xFF] ^ state >> 8
    return state


def crc32c(content: bytes) -> int:
    """The checksum of Prometheus' files, CRC-32C, which Python's standard library lacks."""
    return _advanced(ALL_ONES, content) ^ ALL_ONES


class _Tail:
    """Content that follows many different heads, so that most of the work on their checksums is done once.

    A CRC is linear: the state after the content is the XOR of two states. One comes from the content and the
    initial state 0. The other comes from as many zero bytes and the actual initial state.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._of_zero = _advanced(0, content)
        zeros = bytes(len(content))
        of_bits = [_advanced(1 << bit, zeros) for bit in range(32)]
        self._of_bytes = [
            [_sum(of_bits[8 * place : 8 * place + 8], byte) for byte in range(256)] for place in range(4)
        ]

    def checksum(self, head: bytes) -> int:
        """The checksum of `head` followed by the content."""
        state, total = _advanced(ALL_ONES, head), self._of_zero ^ ALL_ONES
        for place, of_byte in enumerate(self._of_bytes):
            total ^= of_byte[state >> 8 * place & 0xFF]
        return total


def _sum(of_bits: Sequence[int], byte: int) -> int:
    total = 0
    for bit, value in enumerate(of_bits):
        if byte >> bit & 1:
            total ^= value
    return total
