"""Tests of which passwords are checked, how many, and in which order: with real bcrypt, without HTTP."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager

import bcrypt
import pytest

from lockd.export import basic_auth
from lockd.export.basic_auth import MOST_CHECKS, MOST_QUEUES, BasicAuth, TooManyPasswords


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def users(rounds: int = 4, **passwords: str) -> dict[str, str]:
    salt = bcrypt.gensalt(rounds)
    return {name: bcrypt.hashpw(text.encode(), salt).decode() for name, text in passwords.items()}


@contextmanager
def auth() -> Iterator[BasicAuth]:
    one = BasicAuth()
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
    """Return the list of the hashes and passwords that bcrypt is given."""
    given: list[tuple[str, bytes]] = []
    really = basic_auth._matches

    def matches(bcrypt_hash: str, password: bytes) -> tuple[bool, float]:
        given.append((bcrypt_hash, password))
        return really(bcrypt_hash, password)

    monkeypatch.setattr(basic_auth, "_matches", matches)
    return given


def test_a_right_password_does_not_wait_for_the_wrong_ones_from_elsewhere(
    checked: list[tuple[str, bytes]],
) -> None:
    known = users(alice="secret")

    async def run() -> None:
        with auth() as one:
            flood = [one.allows(known, basic("alice", str(number)), "192.0.2.1") for number in range(500)]
            wrong = asyncio.gather(*flood, return_exceptions=True)
            await asyncio.sleep(0)
            assert await one.allows(known, basic("alice", "secret"), "192.0.2.2")
            results = await wrong
        assert results.count(False) == MOST_CHECKS
        assert sum(isinstance(each, TooManyPasswords) for each in results) == 500 - MOST_CHECKS

    asyncio.run(run())
    # The right password had its turn after the checks that had begun, and not after all that waited.
    assert [password for _, password in checked].index(b"secret") <= 2


def test_sources_that_wait_are_not_without_bound() -> None:
    known = users(alice="secret")

    async def run() -> None:
        with auth() as one:
            flood = [one.allows(known, basic("alice", "x"), str(source)) for source in range(1000)]
            results = await asyncio.gather(*flood, return_exceptions=True)
            assert results.count(False) == MOST_QUEUES
            assert await one.allows(known, basic("alice", "secret"), "192.0.2.2")

    asyncio.run(run())


def test_who_has_tried_too_many_waits_and_keeps_nobody_else_waiting(
    checked: list[tuple[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(basic_auth, "WRONG_SHARE", 0.01)
    monkeypatch.setattr(basic_auth, "WRONG_SAVED", 1e-6)
    known = users(alice="secret", bob="other", carol="third")

    async def run() -> None:
        with auth() as one:
            assert await one.allows(known, basic("alice", "secret"), "here")
            began = time.monotonic()
            guesses = [one.allows(known, basic("alice", str(number)), "here") for number in range(8)]
            waiting = asyncio.gather(*guesses)
            while len(checked) < 2:
                await asyncio.sleep(0.001)
            # A password that is known to be right does not wait, even if somebody at that address guesses.
            assert await one.allows(dict(known), basic("alice", "secret"), "here")
            assert await one.allows(known, basic("alice", "secret"), "elsewhere")
            assert await one.allows(known, basic("bob", "other"), "elsewhere")
            passwords = [password for _, password in checked]
            assert passwords[:2] == [b"secret", b"0"]
            assert passwords.count(b"secret") == 1
            assert b"other" in passwords
            assert b"7" not in passwords, "the guesses still wait"
            # A password that is not known yet waits like the guesses, and has its turn.
            assert await one.allows(known, basic("carol", "third"), "here")
            assert not any(await waiting)
            # With this WRONG_SHARE, eight checks take a hundred times as long.
            assert time.monotonic() - began > 0.1

    asyncio.run(run())


def test_unknown_users_cost_what_known_ones_do(checked: list[tuple[str, bytes]]) -> None:
    known = users(4, alice="one") | users(5, bob="two")

    async def run() -> None:
        with auth() as one:
            for number in range(2 * 20):
                assert not await one.allows(known, basic(f"nobody-{number % 20}", "one"), str(number))
                assert not await one.allows(known, basic(f"nobody-{number % 20}", "two"), str(number))

    asyncio.run(run())
    hashes = [bcrypt_hash for bcrypt_hash, _ in checked]
    assert set(hashes) == set(known.values())
    # A name is always checked against the same hash, whether or not it is known.
    assert hashes[:40] == hashes[40:]


def test_a_password_of_before_does_not_count_when_it_has_changed() -> None:
    async def run() -> None:
        with auth() as one:
            assert await one.allows(users(alice="one"), basic("alice", "one"), "here")
            assert not await one.allows(users(alice="two"), basic("alice", "one"), "here")
            assert not await one.allows(users(alice="two"), basic("alice", "two\0"), "here")
            assert await one.allows(users(alice="two"), basic("alice", "two"), "here")

    asyncio.run(run())


def test_a_user_who_was_removed_is_not_let_in_by_the_hash_of_another(
    checked: list[tuple[str, bytes]],
) -> None:
    """Two users may have one hash, which the name of the removed one is then checked against."""
    both = dict.fromkeys(("alice", "bob"), users(alice="secret")["alice"])

    async def run() -> None:
        with auth() as one:
            assert await one.allows(both, basic("bob", "secret"), "here")
            del both["bob"]
            asked = [one.allows(both, basic("bob", "secret"), str(source)) for source in range(3)]
            assert await asyncio.gather(*asked) == [False, False, False]

    asyncio.run(run())
    assert len(checked) == 4  # as many as for a name that was never known


@pytest.mark.parametrize(
    "header",
    [None, "", "Basic", "Basic !", "Bearer YTpi", "Basic YQ==", "Basic //8=", "Basic \xe9\xff", "Basic Y\0"],
)
def test_a_header_that_is_none_is_no_password(header: str | None) -> None:
    async def run() -> bool:
        with auth() as one:
            return await one.allows(users(a="b"), header, "192.0.2.1")

    assert not asyncio.run(run())
