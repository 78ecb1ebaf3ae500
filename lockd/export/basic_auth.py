"""Checks users' passwords against bcrypt hashes, away from the event loop."""

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
"""Passwords of one source that wait for their turn; a check takes 0.1 s."""
MOST_LINES = 256
"""Sources with passwords that wait."""
WRONG_SHARE, WRONG_SAVED = 0.2, 2.0
"""Of a processor, and seconds of it: what the wrong passwords of one source may take."""


class TooManyPasswords(Exception):
    """So many passwords wait to be checked that this one is not looked at."""


@dataclass
class _Line:
    """The passwords of one source, checked one after another."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    length: int = 0


class BasicAuth:
    """Says who may ask; a right password is checked once, however often it comes."""

    def __init__(self) -> None:
        # One thread: trying passwords cannot take more than one core.
        self._thread = ThreadPoolExecutor(1, "bcrypt")
        self._turn = asyncio.Lock()
        """For the thread. Only the first of each line waits for it, so that sources take turns."""
        self._lines: dict[str, _Line] = {}
        self._wrong = Allowance(WRONG_SHARE, WRONG_SAVED)
        self._right: set[bytes] = set()
        self._secret = secrets.token_bytes(32)

    def close(self) -> None:
        """Check no more passwords."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def allows(self, users: Mapping[str, str], authorization: str | None, source: str) -> bool:
        """Whether the Authorization header names one of `users` with the right password.

        Who has sent many wrong ones waits for the answer. Raises TooManyPasswords if too many wait already.
        """
        if not users:
            return True
        credentials = _credentials(authorization)
        if credentials is None:
            return False
        name, password = credentials
        bcrypt_hash = users.get(name) or self._any_hash(users, name)
        # Passwords are not kept, only what nobody can compute without this process's secret.
        key = self._digest(bcrypt_hash.encode(), name.encode(), password)
        if key in self._right:
            return True
        with self._in_line(source) as line:
            async with line.turn:
                if key in self._right:  # somebody before sent the same
                    return True
                await asyncio.sleep(self._wrong.seconds_until_some(source))
                async with self._turn:
                    matches, seconds = await asyncio.get_running_loop().run_in_executor(
                        self._thread, _matches, bcrypt_hash, password
                    )
                is_right = matches and name in users
                if is_right:
                    self._right.add(key)
                else:
                    self._wrong.spend(source, seconds)
                return is_right

    @contextlib.contextmanager
    def _in_line(self, source: str) -> Iterator[_Line]:
        line = self._lines.get(source) or _Line()
        if line.length >= MOST_CHECKS or (len(self._lines) >= MOST_LINES and not line.length):
            raise TooManyPasswords
        self._lines[source] = line
        line.length += 1
        try:
            yield line
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[source]

    def _any_hash(self, users: Mapping[str, str], unknown: str) -> str:
        """For an unknown user, always the same: so the time does not tell who is known, whatever the cost."""
        number = int.from_bytes(self._digest(unknown.encode())[:8], "big")
        return sorted(users.values())[number % len(users)]

    def _digest(self, *parts: bytes) -> bytes:
        told = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._secret, told, "sha256")


def _credentials(authorization: str | None) -> tuple[str, bytes] | None:
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except ValueError:  # no base64, no UTF-8, not even ASCII
        return None


def _matches(bcrypt_hash: str, password: bytes) -> tuple[bool, float]:
    """Whether it does, and the CPU seconds that this took."""
    import bcrypt  # only here: most hosts have no users, and it is a megabyte

    began = time.thread_time()
    # bcrypt uses no more of a password than this, and its newer releases refuse to cut it, and some a NUL.
    matches = bcrypt.checkpw(password.replace(b"\0", b"?")[:72], bcrypt_hash.encode())
    return matches and b"\0" not in password, time.thread_time() - began
