"""A manifest and its descriptors, over a Unix socket from the loader to the service."""

from __future__ import annotations

import array
import os
import socket

from lockd.errors import LockdError
from lockd.kernel.manifest import Manifest

FDS_PER_MESSAGE = 200
"""The kernel takes at most 253 (SCM_MAX_FD) in one message."""
LARGEST = 1 << 26
"""Bytes of a manifest; of ten thousand hooks it has a few millions."""


def send(sock: socket.socket, manifest: Manifest, fds: list[int]) -> None:
    """Length, manifest, number of descriptors; then the descriptors in batches."""
    text = manifest.to_json()
    sock.sendall(len(text).to_bytes(8, "little") + len(fds).to_bytes(8, "little") + text)
    for at in range(0, len(fds), FDS_PER_MESSAGE):
        socket.send_fds(sock, [b"f"], fds[at : at + FDS_PER_MESSAGE])


def receive(sock: socket.socket) -> tuple[Manifest, list[int]]:
    """The manifest and as many descriptors as were announced. LockdError if it is cut short, or none."""
    head = _exactly(sock, 16)
    size = int.from_bytes(head[:8], "little")
    if size > LARGEST:
        raise LockdError(f"loader: handed over {size} bytes; rule: a manifest of at most {LARGEST}")
    text = _exactly(sock, size)
    count = int.from_bytes(head[8:], "little")
    fds: list[int] = []
    while len(fds) < count:
        marker, got, flags, _ = socket.recv_fds(sock, 1, FDS_PER_MESSAGE)
        fds.extend(array.array("i", got))
        if not marker or flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            why = "there is room for no more (RLIMIT_NOFILE)" if marker else "it ended"
            raise LockdError(f"loader: {len(fds)} of {count} descriptors came over: {why}")
    try:
        return Manifest.from_json(text), fds
    except ValueError as error:
        for fd in fds:
            os.close(fd)
        raise LockdError(f"loader: {error}") from None


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise LockdError("loader: ended before it handed anything over")
        parts += part
    return parts
