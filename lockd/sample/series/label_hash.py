"""Stable 64-bit hashes of label sets, by which aggregates and locks are found again in numpy tables."""

from __future__ import annotations

import functools

try:
    from _blake2 import blake2b  # hashlib would load OpenSSL as well, which takes 3 MB
except ImportError:
    from hashlib import blake2b

REMEMBERED = 50_000
"""Label sets whose hashes are kept in a cache."""


@functools.lru_cache(REMEMBERED)
def hash_labels(labels: tuple[str, ...]) -> int:
    """Return a 64-bit hash of a tuple of label values. Every process and version of lockd gets the same."""
    digest = blake2b("\0".join(labels).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
