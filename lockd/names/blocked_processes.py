"""Processes in which a thread has just blocked, as the BPF programs report them through a ring buffer."""

from __future__ import annotations

import sys

from lockd.kernel.rings import Ring, RingReader


class BlockedProcesses:
    """The only reader of the ring. Raises OSError if the kernel refuses to map it.

    Each record is a thread-group id of 32 bits. A record that is read too early (see RingReader) has an old
    id or none: a process is then read in vain.
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
