"""64-bit hashes of label sets, by which aggregates and locks are found again in numpy tables."""

from __future__ import annotations

import functools
import os

try:
    from _blake2 import blake2b  # hashlib would load OpenSSL as well, which takes 3 MB
except ImportError:
    from hashlib import blake2b

REMEMBERED = 50_000
"""The most label sets whose hashes are kept in the cache of hash_labels()."""
_KEY = os.urandom(16)
"""A secret key of the hashes. Users choose names, and label sets with equal hashes count as one. Without the
key a user could find a name whose hash is that of somebody else's label set."""


@functools.lru_cache(REMEMBERED)
def hash_labels(labels: tuple[str, ...]) -> int:
    """Return a 64-bit hash of a tuple of label values. It is the same only as long as this process runs."""
    digest = blake2b("\0".join(labels).encode(), digest_size=8, key=_KEY).digest()
    return int.from_bytes(digest, "little")
