"""Checks users' passwords against bcrypt hashes, away from the event loop."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

_NOBODY = "$2b$10$1t/ChJWntnwWFwuoG0obQ.Dyc61LS7SxrRGmSlsYW2n0jVznfxa9K"
"""Checked for unknown users, so that the time does not tell who is known."""
_MOST_CHECKS = 16
"""More different passwords than this do not wait for their turn; a check takes 0.1 s."""


class TooManyChecks(Exception):
    """So many wrong passwords are being tried that this one is not looked at."""


class BasicAuth:
    """Says who may ask; a right password is checked once, however often it comes."""

    def __init__(self) -> None:
        # One thread: trying passwords cannot take more than one core.
        self._thread = ThreadPoolExecutor(1, "bcrypt")
        self._users: Mapping[str, str] = {}
        self._checks: dict[bytes, asyncio.Future[bool]] = {}
        self._running = 0
        self._secret = secrets.token_bytes(32)

    def close(self) -> None:
        """Check no more passwords."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def allows(self, users: Mapping[str, str], authorization: str | None) -> bool:
        """Whether the Authorization header names one of `users` with the right password."""
        if not users:
            return True
        credentials = _credentials(authorization)
        if credentials is None:
            return False
        if users is not self._users:  # the web configuration has been read again
            self._users, self._checks = users, {}
        name, password = credentials
        # Passwords are not kept, only what nobody can compute without this process's secret.
        name_bytes = name.encode()
        told = len(name_bytes).to_bytes(4, "big") + name_bytes + password
        key = hmac.digest(self._secret, told, "sha256")
        checks = self._checks
        check = checks.get(key)
        if check is None:
            if self._running >= _MOST_CHECKS:
                raise TooManyChecks
            check = checks[key] = asyncio.ensure_future(self._check(users.get(name), password))
        allowed = await asyncio.shield(check)
        if not allowed:  # otherwise wrong guesses would fill the memory
            checks.pop(key, None)
        return allowed

    async def _check(self, bcrypt_hash: str | None, password: bytes) -> bool:
        self._running += 1
        try:
            matches = await asyncio.get_running_loop().run_in_executor(
                self._thread, _matches, bcrypt_hash or _NOBODY, password
            )
        finally:
            self._running -= 1
        return matches and bcrypt_hash is not None


def _credentials(authorization: str | None) -> tuple[str, bytes] | None:
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except (binascii.Error, UnicodeError):
        return None


def _matches(bcrypt_hash: str, password: bytes) -> bool:
    import bcrypt  # only here: most hosts have no users, and it is a megabyte

    if b"\0" in password:
        return False
    # bcrypt uses no more of a password than this, and its newer releases refuse to cut it.
    return bcrypt.checkpw(password[:72], bcrypt_hash.encode())
