"""Processes in which a thread has just blocked, as the BPF programs report them through a ring buffer."""

from __future__ import annotations

import sys

from lockd.kernel.rings import Ring, RingReader


class BlockedProcesses:
    """Reads the ring, which may have one reader at a time. Raises OSError if the kernel refuses to map it.

    Each record is a thread-group id of 32 bits. On arm64 a record that is read while it is written may have
    an older id or 0 (see RingReader). The caller then reads about a wrong process, which does no harm.
    """

    def __init__(self, ring: Ring) -> None:
        self._reader = RingReader(ring)

    def fileno(self) -> int:
        """The ring's descriptor, for poll(): it is readable while there is a record."""
        return self._reader.fileno()

    def read(self) -> list[int]:
        """The thread-group ids that were written since the last call, each once."""
        ids = (int.from_bytes(record[:4], sys.byteorder) for record in self._reader.records())
        return list(dict.fromkeys(ids))
