"""Processes of which a thread has just blocked, as the BPF programs tell them by a ring buffer."""

from __future__ import annotations

import sys

from lockd.kernel.rings import Ring, RingReader


class BlockedProcesses:
    """The only reader of a ring. Raises OSError if the kernel refuses it.

    Each record is a thread group id of 32 bits. What is read too early (see RingReader) is an id of before,
    or none, and a process looked at in vain.
    """

    def __init__(self, ring: Ring) -> None:
        self._reader = RingReader(ring)

    def fileno(self) -> int:
        """Of the ring, to be polled: it can be read from while there is a record."""
        return self._reader.fileno()

    def read(self) -> list[int]:
        """Each thread group id that was written since the last call, once."""
        ids = (int.from_bytes(record[:4], sys.byteorder) for record in self._reader.records())
        return list(dict.fromkeys(ids))
