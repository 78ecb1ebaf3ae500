"""The exporter's end of the control socket: order, sharing, and answers that are late or wrong."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lockd.export import link as sampler_link
from lockd.export.link import Answer, SamplerError, SamplerLink
from lockd.messages import (
    ALIVE,
    NOT_RELOADED,
    PING,
    RELOAD,
    RELOADED,
    REQUEST_SETTLED,
    SETTLED,
    to_memfd,
)

Test = Callable[[SamplerLink, socket.socket], Coroutine[Any, Any, None]]


def play(test: Test) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            await asyncio.wait_for(test(SamplerLink(theirs), ours), 10)

    before = os.listdir("/proc/self/fd")
    asyncio.run(run())
    assert len(os.listdir("/proc/self/fd")) <= len(before)  # no descriptor of an answer stays open


def answer(sampler: socket.socket, block: bytes) -> None:
    fd = to_memfd(block)
    socket.send_fds(sampler, [b"ok"], [fd])
    os.close(fd)


def waiting(sampler: socket.socket) -> bytes:
    """Return the next message that was sent to the sampler, empty if there is none."""
    try:
        return sampler.recv(16, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def test_same_requests_share_one_answer_and_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_link, "REUSE", 60.0)

    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        asked = [asyncio.ensure_future(link.ask(what)) for what in (b"m", b"d", b"m", b"d", b"m")]
        await asyncio.sleep(0.01)
        assert (waiting(sampler), waiting(sampler)) == (b"m", b"")
        answer(sampler, b"metrics")
        await asyncio.sleep(0.01)
        assert (waiting(sampler), waiting(sampler)) == (b"d", b"")
        answer(sampler, b"detail")
        answers = [(await each).block.tobytes() for each in asked]
        assert answers == [b"metrics", b"detail", b"metrics", b"detail", b"metrics"]
        assert await link.ask(b"m") is await asked[0]  # still young enough

    play(test)


def test_an_answer_that_is_no_longer_young_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_link, "REUSE", 0.05)

    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        for block in (b"older", b"newer"):
            asked = asyncio.ensure_future(link.ask(b"m"))
            await asyncio.sleep(0.01)
            assert waiting(sampler) == b"m"
            answer(sampler, block)
            assert (await asked).block.tobytes() == block
            await asyncio.sleep(sampler_link.REUSE + 0.05)

    play(test)


def test_late_answers_are_not_taken_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_link, "TIMEOUT", 0.1)

    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        for what in (b"m", b"d", b"m"):
            with pytest.raises(SamplerError, match="no answer on the control socket within"):
                await link.ask(what)
        assert (waiting(sampler), waiting(sampler)) == (b"m", b"")  # only the first request was sent
        monkeypatch.setattr(sampler_link, "TIMEOUT", 60.0)  # the next request is answered in time
        detail = asyncio.ensure_future(link.ask(b"d"))
        await asyncio.sleep(0)
        answer(sampler, b"metrics")
        await asyncio.sleep(0.01)
        assert waiting(sampler) == b"d"
        answer(sampler, b"detail")
        assert (await detail).block.tobytes() == b"detail"

    play(test)


@pytest.mark.parametrize(
    ("send", "says"),
    [
        (lambda s: s.send(b"ok"), "b'ok' with 0 descriptors; rule: b'ok' with one memfd"),
        (lambda s: s.send(b"no"), "b'no' with 0 descriptors"),
        (lambda s: answer(s, b""), "sampler: "),
        (lambda s: s.shutdown(socket.SHUT_RDWR), "sampler: gone: it has closed the control socket"),
    ],
)
def test_wrong_answers_are_errors(send: Callable[[socket.socket], object], says: str) -> None:
    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        asked = asyncio.ensure_future(link.ask(b"m"))
        await asyncio.sleep(0.01)
        send(sampler)
        with pytest.raises(SamplerError) as raised:
            await asked
        assert says in str(raised.value)
        if link.closed.is_set():
            with pytest.raises(SamplerError, match="sampler: gone"):
                await link.ask(b"m")

    play(test)


def test_what_nobody_asked_for_is_dropped() -> None:
    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        link.report_serving()
        assert waiting(sampler) == b"serving"
        answer(sampler, b"unasked")
        await asyncio.sleep(0.01)
        asked = asyncio.ensure_future(link.ask(b"m"))
        await asyncio.sleep(0.01)
        answer(sampler, b"asked")
        assert (await asked).block.tobytes() == b"asked"

    play(test)


def test_it_says_that_it_is_alive_whatever_else_is_asked() -> None:
    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        asked = asyncio.ensure_future(link.ask(b"m"))
        await asyncio.sleep(0.01)
        sampler.send(PING)
        await asyncio.sleep(0.01)
        assert (waiting(sampler), waiting(sampler)) == (b"m", ALIVE)
        answer(sampler, b"metrics")
        assert (await asked).block.tobytes() == b"metrics"

    play(test)


def test_what_settles_is_said_in_order_and_makes_answers_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_link, "REUSE", 60.0)

    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        asked = asyncio.ensure_future(link.ask(b"m"))
        await asyncio.sleep(0.01)
        answer(sampler, b"before")
        await asked
        first = asyncio.ensure_future(link.wait_until_settled())
        second = asyncio.ensure_future(link.wait_until_settled())
        await asyncio.sleep(0.01)
        assert [waiting(sampler) for _ in range(4)] == [b"m", REQUEST_SETTLED, REQUEST_SETTLED, b""]
        assert await link.ask(b"m") is await asked, "others do not wait"
        sampler.send(SETTLED)
        await first
        assert not second.done()
        later = asyncio.ensure_future(link.ask(b"m"))
        await asyncio.sleep(0.01)
        assert waiting(sampler) == b"m", "the young answer is of before"
        answer(sampler, b"after")
        assert (await later).block.tobytes() == b"after"
        sampler.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([second])
        assert "sampler: gone" in str(second.exception())

    play(test)


def test_what_is_new_after_it_settled_is_shared_for_as_long_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        async def answered(block: bytes, reuse: float) -> Answer:
            monkeypatch.setattr(sampler_link, "REUSE", reuse)
            asked = asyncio.ensure_future(link.ask(b"m"))
            await asyncio.sleep(0)
            answer(sampler, block)
            return await asked

        await answered(b"before", reuse=0.3)
        settled = asyncio.ensure_future(link.wait_until_settled())
        await asyncio.sleep(0)
        sampler.send(SETTLED)
        await settled
        last = await answered(b"after", reuse=60.0)
        await asyncio.sleep(0.4)  # longer than the first answer is reused, shorter than the second
        assert await link.ask(b"m") is last

    play(test)


def test_what_never_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_link, "SETTLED_TIMEOUT", 0.05)

    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        with pytest.raises(SamplerError, match=r"not everything is counted after 0\.05 s; rule: three"):
            await link.wait_until_settled()
        monkeypatch.setattr(sampler_link, "SETTLED_TIMEOUT", 60.0)  # the next request is answered in time
        later = asyncio.ensure_future(link.wait_until_settled())
        sampler.send(SETTLED)  # answers the request that gave up
        await asyncio.sleep(0.01)
        assert not later.done()
        sampler.send(SETTLED)
        await later

    play(test)


def test_a_request_that_the_sampler_would_ignore_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that have given up count, as the sampler has yet to answer their requests."""
    monkeypatch.setattr(sampler_link, "MOST_SETTLING", 2)

    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        first, second = (asyncio.ensure_future(link.wait_until_settled()) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(SamplerError, match=r"2 requests wait already .*; rule: at most 2"):
            await link.wait_until_settled()
        assert [waiting(sampler) for _ in range(3)] == [REQUEST_SETTLED, REQUEST_SETTLED, b""]
        sampler.send(SETTLED)
        sampler.send(SETTLED)
        await second
        later = asyncio.ensure_future(link.wait_until_settled())
        await asyncio.sleep(0.01)
        sampler.send(SETTLED)
        await later

    play(test)


def test_a_time_limit_as_before_python_3_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.11, asyncio raised a TimeoutError of its own, not the builtin one."""

    class OldTimeoutError(Exception):
        pass

    wait_for, raised_now = asyncio.wait_for, asyncio.TimeoutError

    async def old_wait_for(what: Any, timeout: float) -> Any:
        try:
            return await wait_for(what, timeout)
        except raised_now:
            raise OldTimeoutError from None

    monkeypatch.setattr(sampler_link, "TIMEOUT", 0.05)
    monkeypatch.setattr(sampler_link, "SETTLED_TIMEOUT", 0.05)

    async def test(link: SamplerLink, _: socket.socket) -> None:
        monkeypatch.setattr(asyncio, "wait_for", old_wait_for)
        monkeypatch.setattr(asyncio, "TimeoutError", OldTimeoutError)
        for asked in (link.ask(b"m"), link.wait_until_settled()):
            with pytest.raises(SamplerError):
                await asked
        monkeypatch.undo()

    play(test)


def test_a_reload_is_answered_beside_a_request() -> None:
    async def test(link: SamplerLink, sampler: socket.socket) -> None:
        asked: list[tuple[str, float]] = []
        results = [True, False]

        def reload(level: str, share: float) -> bool:
            asked.append((level, share))
            return results.pop(0)

        link.reload = reload
        request = asyncio.ensure_future(link.ask(b"m"))
        sampler.send(RELOAD + b" debug 0.25")
        sampler.send(RELOAD + b" info inf")
        await asyncio.sleep(0.01)
        assert asked == [("debug", 0.25), ("info", float("inf"))]
        assert [sampler.recv(64) for _ in range(3)] == [b"m", RELOADED, NOT_RELOADED]
        answer(sampler, b"metrics")
        assert (await request).block.tobytes() == b"metrics"

    play(test)
