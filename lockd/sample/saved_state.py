"""Where a sampler leaves what it knows for the next one: a file in memory, which outlives it.

In it are what was counted, written now and then, and behind it what was drained since then
(lockd/sample/backlog.py): who reads both has all of it, however the sampler ended. Without a file everything
is in the process's own memory.
"""

from __future__ import annotations

import mmap
import os

try:
    from _blake2 import blake2b  # hashlib would load OpenSSL as well, which takes 3 MB
except ImportError:
    from hashlib import blake2b

PLACE = 1 << 30
"""Bytes between the parts of the file, of which only what is written takes memory: the words below, twice
what was counted, by turns, and what was drained."""
DRAINING, NUMBERS, LENGTHS = 0, 1, 3
"""Words of the first part; of the latter two there is one for each of the blocks."""
LARGEST = 48 << 20
"""Bytes of what was counted; 10,000 lines are some two million."""
DIGEST_BYTES = 32


class Saved:
    """The file `fd`, which may have been another sampler's; without one nothing outlives this process."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._end = 3 * PLACE
        self._words = memoryview(self.memory(mmap.PAGESIZE, 0)).cast("q")

    @property
    def is_kept(self) -> bool:
        """Whether there is a file."""
        return self._fd is not None

    @property
    def is_draining(self) -> bool:
        """Whether rows may be neither in the kernel any more nor in the file yet."""
        return bool(self._words[DRAINING])

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._words[DRAINING] = value

    def memory(self, size: int, at: int | None = None) -> mmap.mmap:
        """So many bytes; what is asked for in the same order is the same of the file each time."""
        if self._fd is None:
            return mmap.mmap(-1, size)
        if at is None:
            at, self._end = self._end, self._end + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(self._fd).st_size < at + size:
            os.ftruncate(self._fd, at + size)
        return mmap.mmap(self._fd, size, offset=at)

    def write(self, block: bytes) -> None:
        """Let this be what read() gives: it, or what was written before, at whatever moment the process ends.

        Raises OSError, and then it is nothing.
        """
        assert self._fd is not None
        if len(block) > LARGEST:
            raise OSError(f"{len(block)} bytes are more than {LARGEST}")
        number = max(self._words[NUMBERS : NUMBERS + 2]) + 1
        which = number % 2
        digest = blake2b(block, digest_size=DIGEST_BYTES).digest()
        try:
            written = os.pwritev(self._fd, [digest, block], (1 + which) * PLACE)
            if written < DIGEST_BYTES + len(block):
                raise OSError(f"only {written} bytes could be written")
        except OSError:
            self._words[NUMBERS] = self._words[NUMBERS + 1] = 0
            raise
        self._words[LENGTHS + which] = len(block)
        self._words[NUMBERS + which] = number

    def read(self) -> memoryview | None:
        """What was written last; None if there is nothing. Raises ValueError if it is damaged."""
        assert self._fd is not None
        number = max(self._words[NUMBERS : NUMBERS + 2])
        if not number:
            return None
        which = number % 2
        length = self._words[LENGTHS + which]
        if not 0 <= length <= LARGEST:
            raise ValueError(f"what was counted has {length} bytes; rule: {LARGEST} at most")
        text = memoryview(os.pread(self._fd, DIGEST_BYTES + length, (1 + which) * PLACE))
        digest, block = text[:DIGEST_BYTES], text[DIGEST_BYTES:]
        if digest != blake2b(block, digest_size=DIGEST_BYTES).digest():
            raise ValueError("what was counted is damaged")
        return block
