"""Messages between the sampler and the exporter, and the block of data that travels with them.

Both ends share one Unix socket of type SOCK_SEQPACKET, so that each send() is one message. Each message
begins with one of the words below, or says why the sampler has no block for a request. With the word HERE the
sampler sends the descriptor of a file in memory (memfd), which holds one block: when the sampler writes the
file, it never waits for a reader. The exporter sends only words, so that no byte from the network reaches the
sampler.

A block is a JSON head and raw arrays. The sampler writes numpy arrays and the exporter reads plain
memoryviews, so that the exporter needs no numpy (25 MB less resident memory). The sampler also saves its
counts for the next start as a block (lockd/sample/saved_state.py).
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from typing import Any, Protocol

from lockd.process import memory

try:
    from _blake2 import blake2b  # hashlib would load OpenSSL as well, which takes 3 MB
except ImportError:
    from hashlib import blake2b

# Words of the sampler, and what the exporter answers to them.
SERVE = b"serve"
"""The sampler's first message to an exporter: the sampler answers requests from this moment on."""
SERVING = b"serving"
"""The exporter's first message, which says that it accepts connections."""
PING = b"ping"
"""The sampler asks every few seconds whether the exporter's event loop runs. The answer is ALIVE."""
ALIVE = b"alive"
RELOAD = b"reload"
"""The sampler asks the exporter to take other settings and to read the web configuration again.

The full message is `reload LEVEL SHARE`: the log level, and the share of one processor for requests (a
decimal number, or `inf`). The answer is RELOADED, or NOT_RELOADED if the web configuration is wrong.
"""
RELOADED, NOT_RELOADED = b"reloaded", b"not reloaded"

# Requests of the exporter, and what the sampler answers to them.
REQUEST_METRICS = b"m"
"""Request for the block behind /metrics: every series."""
REQUEST_DETAIL = b"d"
"""Request for the block behind /api/v1 and the profiles of locks: the tables of threads, locks, bottlenecks
and deadlocks."""
REQUEST_WAITS = b"w"
"""Request for the block behind the profiles of waits off the CPU."""
HERE = b"ok"
"""The answer to a request for a block, sent with the descriptor of the file that holds the block. Any other
answer says why there is no block."""
REQUEST_SETTLED = b"s"
"""Request for an answer as soon as everything that happened before the request is counted. The answer is
SETTLED, without a block."""
SETTLED = b"settled"
MOST_SETTLING = 10_000
"""Most requests of the kind REQUEST_SETTLED that may wait for an answer at a time. The exporter makes no more
of them, and the sampler ignores any more."""

DIGEST_BYTES = 32


class Array(Protocol):
    """An object with the buffer protocol that can copy itself: a numpy array or an array.array."""

    def tobytes(self) -> bytes: ...


def pack(head: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """Encode a block. `head` must be JSON; each array must be C-contiguous, of int64 or float64."""
    bodies = {name: array.tobytes() for name, array in arrays.items()}
    layout: dict[str, tuple[str, int]] = {
        name: (memoryview(array).format, len(bodies[name]))  # type: ignore[arg-type]  # numpy has the buffer protocol
        for name, array in arrays.items()
    }
    text = json.dumps({"head": head, "arrays": layout}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)  # arrays are aligned to 8 bytes
    return b"".join([len(text).to_bytes(8, "little"), text, *bodies.values()])


def unpack(block: memoryview) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """The head and the arrays of a block, each array as a flat memoryview of format `l`, `q` or `d`."""
    size = int.from_bytes(block[:8], "little")
    described = json.loads(bytes(block[8 : 8 + size]))
    arrays: dict[str, memoryview] = {}
    at = 8 + size
    for name, (form, length) in described["arrays"].items():
        arrays[name] = block[at : at + length].cast(form)
        at += length
    return described["head"], arrays


def to_memfd(block: bytes) -> int:
    """A file in memory that holds `block`, as a descriptor that the caller closes.

    Raises OSError if there is no memory or no descriptor left.
    """
    fd = memory.create_file("lockd-snapshot")
    view = memoryview(block)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:  # there is no memory for the file
        os.close(fd)
        raise
    return fd


def from_memfd(fd: int) -> memoryview:
    """The block in a file in memory. The descriptor is closed; the memory lives as long as the view."""
    try:
        return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def digest(data: bytes | memoryview) -> bytes:
    """A digest of DIGEST_BYTES bytes, which shows whether saved data is complete and unchanged.

    It has no key, so it does not prove who wrote the data.
    """
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
