"""Checks of passwords against bcrypt hashes, in a thread beside the event loop."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lockd.export.sources import Allowance

MOST_CHECKS = 32
"""The largest number of passwords from one source that wait to be checked. A check takes 0.1 s of CPU
time, or up to a second if the hash was made with a higher cost."""
MOST_QUEUES = 256
"""The largest number of sources with passwords that wait to be checked."""
WRONG_SHARE, WRONG_SAVED = 0.2, 2.0
"""Limits of one source for checks of wrong passwords: a share of a processor, and the most CPU seconds that
it can save up (lockd/export/sources.py)."""


class TooManyPasswords(Exception):
    """The password is not checked because too many others wait already."""


@dataclass
class _Queue:
    """The passwords of one source, which are checked one after another."""

    first: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the request whose password is the next to be checked."""
    length: int = 0


class BasicAuth:
    """Checks the Authorization headers of requests. A right password needs bcrypt only the first time."""

    def __init__(self) -> None:
        # With one thread, clients that try passwords use one core at most.
        self._thread = ThreadPoolExecutor(1, "bcrypt")
        self._turn = asyncio.Lock()
        """Held to use `_thread`. Only the first request of each queue waits for it, so sources take turns."""
        self._queues: dict[str, _Queue] = {}
        """Queues by source."""
        self._wrong = Allowance(WRONG_SHARE, WRONG_SAVED)
        self._right: set[bytes] = set()
        """Digests of right passwords. Each is made of a bcrypt hash, a user name and the password."""
        self._ended = asyncio.Event()
        self._secret = secrets.token_bytes(32)

    def close(self) -> None:
        """Begin no further check. From now on only passwords that were found right before count as right. At
        most one request still waits: for the check that runs."""
        self._ended.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def allows(self, users: Mapping[str, str], authorization: str | None, source: str) -> bool:
        """Whether the Authorization header names one of `users` with the right password.

        `users`: bcrypt hashes by user name; if there are none, every request is allowed. The answer is
        delayed for a source that has sent many wrong passwords. Raises TooManyPasswords if too many passwords
        wait to be checked.
        """
        if not users:
            return True
        credentials = _credentials(authorization)
        if credentials is None:
            return False
        name, password = credentials
        bcrypt_hash = users.get(name) or self._any_hash(users, name)
        # Passwords are not stored, but digests that cannot be computed without this process's secret.
        key = self._digest(bcrypt_hash.encode(), name.encode(), password)
        is_known = name in users  # a removed user's `key` is right still if another user has the same hash
        if is_known and key in self._right:
            return True
        with self._queued(source) as queue:
            async with queue.first:
                if is_known and key in self._right:  # checked for a request before this one
                    return True
                with contextlib.suppress(asyncio.TimeoutError):  # is TimeoutError only since Python 3.11
                    await asyncio.wait_for(self._ended.wait(), self._wrong.seconds_until_allowed(source))
                async with self._turn:
                    if self._ended.is_set():
                        return False
                    matches, seconds = await asyncio.get_running_loop().run_in_executor(
                        self._thread, _matches, bcrypt_hash, password
                    )
                is_right = matches and is_known
                if is_right:
                    self._right.add(key)
                else:
                    self._wrong.spend(source, seconds)
                return is_right

    @contextlib.contextmanager
    def _queued(self, source: str) -> Iterator[_Queue]:
        queue = self._queues.get(source) or _Queue()
        if queue.length >= MOST_CHECKS or (len(self._queues) >= MOST_QUEUES and not queue.length):
            raise TooManyPasswords
        self._queues[source] = queue
        queue.length += 1
        try:
            yield queue
        finally:
            queue.length -= 1
            if not queue.length:
                del self._queues[source]

    def _any_hash(self, users: Mapping[str, str], unknown: str) -> str:
        """The hash of some user, always the same for the same unknown name.

        The time of the check then does not reveal which names are known, whatever the costs of their hashes.
        """
        number = int.from_bytes(self._digest(unknown.encode())[:8], "big")
        return sorted(users.values())[number % len(users)]

    def _digest(self, *parts: bytes) -> bytes:
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._secret, message, "sha256")


def _credentials(authorization: str | None) -> tuple[str, bytes] | None:
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except ValueError:  # not base64, or its user name is not UTF-8
        return None


def _matches(bcrypt_hash: str, password: bytes) -> tuple[bool, float]:
    """Whether the password has this hash, and the CPU seconds that the check took."""
    import bcrypt  # not at the top: it takes 1 MB of memory, and most hosts need no passwords

    began = time.thread_time()
    # bcrypt uses the first 72 bytes of a password. Its newer releases refuse longer passwords instead of
    # cutting them, and some releases refuse NUL bytes.
    matches = bcrypt.checkpw(password.replace(b"\0", b"?")[:72], bcrypt_hash.encode())
    return matches and b"\0" not in password, time.thread_time() - began
