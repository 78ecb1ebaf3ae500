"""The saved state: a file in memory in which a sampler leaves its counts to the next sampler.

The file outlives the sampler because systemd keeps its descriptor. It holds the counts, which are written
every few seconds, and the rows that were drained since (Backlog in lockd/sample/drain.py). Together they have
everything that was drained and is counted, unless the sampler ended in the middle of a drain or the counts
could not be written. Without a file everything is in the process's own memory.
"""

from __future__ import annotations

import mmap
import os

from lockd.messages import DIGEST_BYTES, digest

PLACE = 1 << 30
"""Bytes from one part of the file to the next; only what is written takes memory.

The parts are: the words (DRAINING, NUMBERS, LENGTHS), two places that hold the counts by turns, and the
drained rows.
"""
DRAINING, NUMBERS, LENGTHS = 0, 1, 3
"""Positions of the words in the first part: one says whether a drain is under way (is_draining), two have
the numbers of the blocks of counts in the two places, and two the lengths of these blocks in bytes. The block
with the higher number is newer."""
LARGEST = 512 << 20
"""Most bytes of a block of counts. With 10,000 lines in /metrics a block has some 2 MB. With a million lines,
the most that the configuration allows, a block has up to 200 bytes for each line."""


class SavedState:
    """The saved state in the file `fd`, which an earlier sampler may have written.

    Without `fd` nothing outlives this process.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._end = 3 * PLACE
        self._words = memoryview(self.allocate(mmap.PAGESIZE, 0)).cast("q")

    @property
    def has_file(self) -> bool:
        return self._fd is not None

    @property
    def is_draining(self) -> bool:
        """Whether rows may have left the kernel and not be in the file yet."""
        return bool(self._words[DRAINING])

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._words[DRAINING] = value

    def allocate(self, size: int, offset: int | None = None) -> mmap.mmap:
        """Return `size` bytes of memory, which are part of the file if there is one.

        Without `offset`, each call gets the bytes behind those of the call before: a sampler that calls this
        in the same order and with the same sizes finds what the sampler before it left.
        """
        if self._fd is None:
            return mmap.mmap(-1, size)
        if offset is None:
            offset, self._end = self._end, self._end + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(self._fd).st_size < offset + size:
            os.ftruncate(self._fd, offset + size)
        return mmap.mmap(self._fd, size, offset=offset)

    def write(self, block: bytes) -> None:
        """Replace the block that read() returns.

        If the process ends meanwhile, read() returns either this block or the one before. Raises OSError if
        the block cannot be written; read() then returns None.
        """
        assert self._fd is not None
        number = max(self._words[NUMBERS : NUMBERS + 2]) + 1
        place = number % 2
        try:
            if len(block) > LARGEST:
                raise OSError(f"{len(block)} bytes are more than {LARGEST}")
            written = os.pwritev(self._fd, [digest(block), block], (1 + place) * PLACE)
            if written < DIGEST_BYTES + len(block):
                raise OSError(f"only {written} bytes could be written")
        except OSError:
            self._words[NUMBERS] = self._words[NUMBERS + 1] = 0
            raise
        self._words[LENGTHS + place] = len(block)
        self._words[NUMBERS + place] = number

    def read(self) -> memoryview | None:
        """The block that was written last; None if there is none. Raises ValueError if it is damaged."""
        assert self._fd is not None
        number = max(self._words[NUMBERS : NUMBERS + 2])
        if not number:
            return None
        place = number % 2
        length = self._words[LENGTHS + place]
        if not 0 <= length <= LARGEST:
            raise ValueError(f"what was counted has {length} bytes; rule: {LARGEST} at most")
        text = memoryview(os.pread(self._fd, DIGEST_BYTES + length, (1 + place) * PLACE))
        block = text[DIGEST_BYTES:]
        if text[:DIGEST_BYTES] != digest(block):
            raise ValueError("what was counted is damaged")
        return block
