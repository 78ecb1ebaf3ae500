"""What the sampler hands the exporter: a JSON head and raw arrays in one block of memory.

The sampler writes numpy arrays, the exporter reads plain memoryviews, so that the
exporter needs no numpy (25 MB less resident memory) and nothing is parsed that came
from the network. The block travels as a memfd: writing it never waits for the reader.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from typing import Any, Protocol

SERVE = b"serve"
"""The sampler's first message to the exporter: there is something to ask for."""
SERVING = b"serving"
"""The exporter's first: connections are being accepted."""
PING = b"ping"
"""The sampler asks now and then whether the exporter's loop runs; the answer is ALIVE."""
ALIVE = b"alive"
RELOAD = b"reload"
"""The sampler asks for the web configuration to be read again, and for a level of the log and a share for
requests, with blanks between; the answer is RELOADED, or NOT_RELOADED if the web configuration is wrong."""
RELOADED, NOT_RELOADED = b"reloaded", b"not reloaded"
REQUEST_METRICS = b"m"
"""Ask for every series: the block behind /metrics."""
REQUEST_DETAIL = b"d"
"""Ask for the per-thread and per-lock aggregates: the block behind /api/v1."""


REQUEST_SETTLED = b"s"
"""Ask to be told once everything that happened before is counted; the answer is SETTLED, without a block."""
SETTLED = b"settled"


class Array(Protocol):
    """Anything with the buffer protocol that can copy itself: a numpy array, an array.array."""

    def tobytes(self) -> bytes: ...


def pack(head: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """One block: `head` must be JSON; every array must be C-contiguous, of int64 or float64."""
    bodies = {name: array.tobytes() for name, array in arrays.items()}
    layout: dict[str, tuple[str, int]] = {
        name: (memoryview(array).format, len(bodies[name]))  # type: ignore[arg-type]  # numpy has the buffer protocol
        for name, array in arrays.items()
    }
    text = json.dumps({"head": head, "arrays": layout}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)  # arrays start on an 8-byte edge
    return b"".join([len(text).to_bytes(8, "little"), text, *bodies.values()])


def unpack(block: memoryview) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """The head and the arrays of a block, each a flat memoryview of format `l`, `q` or `d`."""
    size = int.from_bytes(block[:8], "little")
    described = json.loads(bytes(block[8 : 8 + size]))
    arrays: dict[str, memoryview] = {}
    at = 8 + size
    for name, (form, length) in described["arrays"].items():
        arrays[name] = block[at : at + length].cast(form)
        at += length
    return described["head"], arrays


def to_memfd(block: bytes) -> int:
    """A memory file that holds `block`; the caller closes it."""
    fd = os.memfd_create("lockd-snapshot", os.MFD_CLOEXEC)
    view = memoryview(block)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:  # no memory
        os.close(fd)
        raise
    return fd


def from_memfd(fd: int) -> memoryview:
    """The block in a memory file; closes `fd`."""
    try:
        return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
