"""Harnesses for what lockd's processes say to each other, and what they keep for the next start.

The namer and the exporter read what strangers wrote. The other processes therefore trust nothing that these
two send.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mmap
import os
import random
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.exposition import choose_encoder

from lockd.errors import LockdError
from lockd.export.detail import (
    OF_LOCKS,
    OFFCPU,
    SIDES,
    ProfileQuery,
    parse_query,
    profile_of,
    render_table,
)
from lockd.export.exposition import Exposition
from lockd.export.link import SamplerError, SamplerLink
from lockd.export.wait_profile import profile_of_waits
from lockd.kernel.manifest import Chosen, Hook, Manifest, MapInfo
from lockd.load.child import receive_result
from lockd.load.compiled import CompileCache, Compiled, MapDefinition, key_of
from lockd.messages import (
    ALIVE,
    PING,
    REQUEST_DETAIL,
    REQUEST_METRICS,
    REQUEST_SETTLED,
    REQUEST_WAITS,
    SERVING,
    SETTLED,
    to_memfd,
    unpack,
)
from lockd.names import client
from lockd.names.client import Resolver
from lockd.names.protocol import (
    MOST_FUNCTIONS,
    NOT_READ,
    Answer,
    Asked,
    CPythonPlaces,
    GoWaits,
    GoWaitsAnswer,
    HolderAnswer,
    HotSpotPlaces,
    KernelLock,
    KernelLockReleased,
    LockAnswer,
    LockReleased,
    NamerSettings,
    OwnedLock,
    Owners,
    OwnersAnswer,
    StackAnswer,
    ThreadCaptured,
    UserLockSeen,
    Watch,
    decode_question,
    encode_answer,
)
from lockd.names.shares import BENCH, Bench, Shares
from lockd.names.unwind.capture import Capture
from lockd.sample.loop import Loop
from lockd.service.exporter import Supervisor
from tests.fuzz.clock import Loop as SkippingLoop
from tests.fuzz.harness import Harness, json_mutation, mutated, mutated_lines
from tests.fuzz.web import detail_block
from tests.support.exporter_process import full_block, waits_block

QUESTIONS: tuple[Asked, ...] = (
    UserLockSeen(5, 7, 8, 0x7F00, "lock", Capture(tuple(range(17)), bytes(64), (1, 2), 0x7F00)),
    KernelLock(6, 0xFFFF888100000040, "mutex", (0xFFFFFFFF81000000,)),
    Owners(3, (OwnedLock(7, 0x7F00, "lock", "mutex"), OwnedLock(7, 0x7F08, "pi", ""))),
    GoWaits((7, 9)),
    LockReleased(4, 7, Capture(tuple(range(17)), bytes(64), (1, 2), 0x7F00), (0x7F40, 0x7F80)),
    KernelLockReleased(5, (0xFFFFFFFF81000000, 1)),
    ThreadCaptured(6, 7, (0xFFFFFFFF81000000, 1), Capture(tuple(range(17)), bytes(64), (1, 2), 0x7F00)),
    ThreadCaptured(7, 2, (0xFFFFFFFF81000000,)),
)
ANSWERS: tuple[Answer, ...] = (
    LockAnswer(
        5, True, "shop:orders", "shop:put", ("shop:put", "main"), "lock", "mutex", hotspot=tuple(range(14))
    ),
    LockAnswer(6, False, "pipe->mutex", "pipe_write"),
    LockAnswer(7, True, "app.py:put", "app.py:put", (), "lock", "thread_lock", cpython=tuple(range(7))),
    OwnersAnswer(3, (8, NOT_READ)),
    GoWaitsAnswer((7, 9), (-1, 10**12)),
    HolderAnswer(4, "shop:put", ("shop:put", "main")),
    StackAnswer(6, ("read", "main"), (0x7F00, 2**64 - 1), ("schedule", "vfs_read"), ()),
    StackAnswer(7, (), (), ("schedule",), (0xFF00,)),
)


class Talker:
    """Stands for the process of the namer. It drops all questions, and answers with the input."""

    pid = 1

    def __init__(self, _settings: NamerSettings | None = None) -> None:
        self.bench = SimpleNamespace(turn=(-1, -1))
        self.says: list[bytes] = []

    def send(self, _message: bytes) -> bool:
        return True

    def receive(self) -> list[bytes]:
        said, self.says = self.says, []
        return said

    def kill(self) -> None:
        """There is no process to end."""

    def has_ended(self) -> bool:
        return True

    def cpu_seconds(self) -> float:
        return 0.0


def answers(data: bytes) -> None:
    """Whatever a namer sends, the sampler takes only answers to its questions, with values of the agreed
    types. After any other message it starts another namer."""
    client.Namer = Talker  # type: ignore[assignment,misc]  # no process
    asker = Resolver()
    asker.answers()  # starts the namer
    for question in QUESTIONS:
        assert asker.ask(question)
    asker.answers()
    asked = [*asker._outstanding]
    namer = asker._namer
    assert isinstance(namer, Talker)
    namer.says = data.split(b"\n")
    for answer, question in zip(asker.answers(), asked, strict=False):
        expected = question.fallback()
        assert type(answer) is type(expected)
        assert _numbers_of(answer) == _numbers_of(expected), "an answer to another question"
        _check(answer)


def _numbers_of(answer: Answer) -> tuple[object, ...]:
    """Return the numbers in an answer that tell which question it answers."""
    match answer:
        case LockAnswer():
            return answer.key, answer.is_user
        case OwnersAnswer():
            return answer.token, len(answer.tids)
        case GoWaitsAnswer():
            return answer.tgids, len(answer.waited_ns)
        case HolderAnswer():
            return (answer.token,)
        case StackAnswer():
            return answer.token, len(answer.returns) - len(answer.user)


def _check(answer: Answer) -> None:
    if isinstance(answer, LockAnswer):
        for field in fields(answer):
            value = getattr(answer, field.name)
            kind = {"int": int, "bool": bool, "str": str}.get(str(field.type), tuple)
            assert type(value) is kind, f"{field.name} is {value!r}"
        assert all(type(name) is str for name in answer.stack)
        assert len(answer.hotspot) in (0, len(fields(HotSpotPlaces)))
        assert len(answer.cpython) in (0, len(fields(CPythonPlaces)))
        numbers: Sequence[int] = (*answer.hotspot, *answer.cpython)
        assert all(0 <= number < 2**63 for number in numbers)
    elif isinstance(answer, HolderAnswer):
        assert all(type(name) is str for name in (answer.site, *answer.stack))
        numbers = (answer.token,)
    elif isinstance(answer, StackAnswer):
        assert all(type(name) is str for name in (*answer.user, *answer.kernel))
        assert max(len(answer.user), len(answer.kernel)) <= MOST_FUNCTIONS
        numbers = (answer.token,)
        assert all(0 <= address < 2**64 for address in (*answer.returns, *answer.interrupts))
    else:
        numbers = answer.tids if isinstance(answer, OwnersAnswer) else answer.waited_ns
        assert all(-(2**63) <= number < 2**63 for number in numbers)
    assert all(type(number) is int for number in numbers)


def said_by_namers() -> list[bytes]:
    each = [encode_answer(answer).removesuffix(b"\n") for answer in ANSWERS]
    return [b"\n".join(each), *(b"\n".join(each[:at]) for at in (1, 2)), each[2]]


def questions(data: bytes) -> None:
    """An input that can be read as a question means the same once it is written again."""
    try:
        question = decode_question(data)
        again = question.encode()
    except (ValueError, KeyError, TypeError):
        return
    assert decode_question(again).encode() == again


def asked_questions() -> list[bytes]:
    return [question.encode() for question in (*QUESTIONS, Watch((1, 2), (3,)))]


def shared_bench(data: bytes) -> None:
    """A namer may write anything into the memory that it shares; the next namer starts with what is there."""
    memory = os.memfd_create("fuzz-bench")
    try:
        os.ftruncate(memory, mmap.PAGESIZE)
        bench = Bench(memory)
        os.pwrite(memory, data[: BENCH.size], 0)
        settings = NamerSettings("/proc", 20, (), 0.25, [(bench.turn, 10.0)], None)
        again = NamerSettings.from_json(settings.to_json())
        shares = Shares(Path("/nowhere"), again.share, None, again.owing, clock=lambda: 1.0)
        with shares.turn(bench.turn[0]):
            pass
        shares.keep(set())
    finally:
        os.close(memory)


MANIFEST = Manifest(
    attached_ns=123_456_789,
    chosen=(Chosen("futex", "calls", "tracepoint", ""), Chosen("offcpu", "switches", "", "no tracepoint")),
    hooks=(
        Hook("futex", "sys_enter_futex", "tracepoint", True),
        Hook("futex", "x", "kprobe", False, "no kprobes"),
    ),
    maps=(MapInfo("numbers", 64, "u4", {"names": ["a"], "formats": ["u8"], "offsets": [0], "itemsize": 8}),),
    functions=(("futex", "on_enter"),),
    enums={"kind": ("lock", "cond")},
    constants={"SLOTS": 27},
)


def manifest(data: bytes) -> None:
    """An input is a manifest that means the same once it is written again, or a ValueError."""
    try:
        found = Manifest.from_json(data)
    except ValueError:
        return
    text = found.to_json()
    assert Manifest.from_json(text).to_json() == text


def handed_over(data: bytes) -> None:
    """Whatever a loader sends, and whenever it ends, the result is a manifest with its descriptors or a
    LockdError. No other descriptor stays open."""
    before = _next_descriptor()
    ours, theirs = socket.socketpair()
    null = os.open(os.devnull, os.O_RDONLY)
    ours.settimeout(5)
    fds: list[int] = []
    with ours:
        with theirs:
            theirs.sendall(data[1:])
            for count in data[:1]:
                socket.send_fds(theirs, [b"f"], [null] * (count % 3))
        with contextlib.suppress(LockdError):
            _, fds = receive_result(ours)
    for fd in (*fds, null):
        os.close(fd)
    assert _next_descriptor() == before, "a descriptor stays open"


def _next_descriptor() -> int:
    number = os.dup(0)
    os.close(number)
    return number


def handovers() -> list[bytes]:
    text = MANIFEST.to_json()
    heads = (len(text), 0), (len(text), 2), (2**63, 0), (2**40, 1), (len(text), 2**63)
    return [b"\2" + struct.pack("<QQ", *head) + text for head in heads]


COMPILED = Compiled(
    maps=(
        MapDefinition("numbers_0", 1, 4, 8, 64, 0, "", 3, 4, "u4", {"names": ["a"], "formats": ["u8"]}),
        MapDefinition("numbers", 12, 4, 4, 2, 0, "numbers_0", 0, 0, "i4", "i4"),
    ),
    functions={"on_it": bytes((0x18, 0x11, 0, 0, 1, 0, 0, 0)) + bytes(8), "on_nothing": b""},
    btf=b"\x9f\xeb\x01\x00",
)
KEY = key_of(("a source", "a host"))


@functools.cache
def _cache() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="lockd-fuzz-")) / "cache"
    CompileCache(directory).add(KEY, COMPILED)
    return directory


def kept(data: bytes) -> None:
    """The cache returns a whole program or none. It reads a kept program only if the digest is right."""
    from lockd.load.compiled import _digest

    content = data[1:]
    digest = _digest(KEY, content) if data[:1] != b"0" else b"0" * 64
    (_cache() / KEY).write_bytes(digest + b"\n" + content)
    found = CompileCache(_cache()).find(KEY)
    if found:
        assert Compiled.from_json(found.to_json()) == found


def kept_programs() -> list[bytes]:
    return [b"1" + COMPILED.to_json(), b"0" + COMPILED.to_json()]


def _behind_a_byte(mutate: Any) -> Any:
    return lambda data, chance: data[:1] + mutate(data[1:], chance)


@functools.cache
def _exposition() -> Exposition:
    return Exposition(choose_encoder("")[0], Path("/proc"))


def snapshot(data: bytes) -> None:
    """A block that breaks the protocol does no more than raise an exception, which is answered with 500."""
    head, newline, rest = data.partition(b"\n")
    block = memoryview(len(head).to_bytes(8, "little") + head + rest) if newline else memoryview(data)
    try:
        found, arrays = unpack(block)
    except Exception as error:
        assert not isinstance(error, MemoryError), error
        return
    for use in (
        lambda: _exposition().text(found, arrays),
        *(
            lambda name=name: render_table(name, found, arrays, parse_query({}))
            for name in ("locks", "threads")
        ),
        *(lambda one=one: profile_of(ProfileQuery(one, {}), found, arrays) for one in OF_LOCKS),
        *(lambda by=by: profile_of_waits(_waits(by), found, found) for by in SIDES[OFFCPU]),
    ):
        try:
            use()
        except Exception as error:
            assert not isinstance(error, MemoryError), error


def _waits(by: str) -> ProfileQuery:
    return ProfileQuery(OFFCPU, {"by": [by.encode()]})


def blocks() -> list[bytes]:
    found = []
    for block in (detail_block(), full_block(1), waits_block()):
        size = int.from_bytes(block[:8], "little")
        found.append(block[8 : 8 + size].strip() + b"\n" + block[8 + size :])
    return found


def link(data: bytes) -> None:
    """Whatever arrives at the exporter's end of the control socket, each request gets a block or a
    SamplerError, and no descriptor stays open."""
    before = _next_descriptor()
    with SkippingLoop() as loop:
        loop.run_until_complete(_exchange(data))
    assert _next_descriptor() == before, "a descriptor stays open"


async def _exchange(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        sampler = SamplerLink(theirs)
        wanted = (REQUEST_METRICS, REQUEST_DETAIL, REQUEST_WAITS)
        asked = [asyncio.ensure_future(sampler.ask(what)) for what in wanted]
        # This request returns nothing, unlike the others.
        asked.append(asyncio.ensure_future(sampler.wait_until_settled()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        at = 0
        while at < len(data) and not sampler.closed.is_set():
            fds = [to_memfd(data[at : at + 16]) for _ in range(data[at] & 3)]
            size = data[at] >> 2
            try:
                socket.send_fds(ours, [data[at + 1 : at + 1 + size]], fds)
            finally:
                for fd in fds:
                    os.close(fd)
            at += 1 + size
            await asyncio.sleep(0)
        ours.shutdown(socket.SHUT_RDWR)
        for result in await asyncio.gather(*asked, return_exceptions=True):
            assert not isinstance(result, BaseException) or isinstance(result, SamplerError), result
        del asked


def conversations() -> list[bytes]:
    said = (
        b"\x09ok",
        bytes((len(SETTLED) << 2,)) + SETTLED,
        bytes((len(PING) << 2,)) + PING,
        b"\x08ok",
        b"\x0bno",
        b"\x01",
    )
    return [b"".join(said), b"".join(reversed(said)), said[0] * 3]


def requests(data: bytes) -> None:
    """Whatever an exporter sends, the sampler goes on, and does no more than it is asked for."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wakeup, _other = socket.socketpair()
    exporter = SimpleNamespace(
        control=ours, serve=lambda: None, close=lambda: None, kill=lambda: None, exit_code=lambda: 0
    )
    sampler = SimpleNamespace(
        metrics=lambda: b"metrics", details=lambda: b"details", wait_stacks=lambda: b"waits",
        own_cost=SimpleNamespace(ticks=1),
        begin_settling=lambda: 4, has_counted=lambda tick: True,
    )  # fmt: skip
    with ours, theirs, wakeup, _other:
        ours.setblocking(False)
        theirs.setblocking(False)
        # Exporter and sampler are no processes here, only what Supervisor and Loop use of them.
        supervisor = Supervisor(lambda: exporter, exporter)  # type: ignore[arg-type,return-value]
        loop = Loop(sampler, 10, supervisor.handle_message, lambda: None, wakeup)  # type: ignore[arg-type]
        loop.control = ours
        at = 0
        while at < len(data):
            size = data[at] & 63
            try:
                theirs.send(data[at + 1 : at + 1 + size])
            except BlockingIOError:
                break
            loop._take_message(ours)
            at += 1 + size
        loop._answer_settled()
        with contextlib.suppress(BlockingIOError):
            while got := socket.recv_fds(theirs, 64, 4):
                for fd in got[1]:
                    os.close(fd)


def said_by_exporters() -> list[bytes]:
    said = (SERVING, ALIVE, REQUEST_METRICS, REQUEST_DETAIL, REQUEST_WAITS, REQUEST_SETTLED, b"", b"x" * 60)
    return [b"".join(bytes((len(one),)) + one for one in said)]


def _other_handover(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return mutated(data, chance)
    text = json_mutation()(data[17:], chance)
    return data[:1] + struct.pack("<QQ", len(text), data[0] % 3 if data else 0) + text


TURNS = ((0, 0), (8, 1001), (-1, -1))
HARNESSES = (
    Harness("answers", answers, said_by_namers, mutated_lines(json_mutation())),
    Harness("questions", questions, asked_questions, json_mutation(mutated)),
    Harness("bench", shared_bench, lambda: [BENCH.pack(*one) for one in TURNS], mutated, longest=16),
    Harness("manifest", manifest, lambda: [MANIFEST.to_json()], json_mutation()),
    Harness("handover", handed_over, handovers, _other_handover),
    Harness("kept", kept, kept_programs, _behind_a_byte(json_mutation())),
    Harness("snapshot", snapshot, blocks, json_mutation(mutated), longest=1 << 16),
    Harness("link", link, conversations, mutated, words=(b"\x09ok", PING, SETTLED)),
    Harness("requests", requests, said_by_exporters, mutated),
)  # fmt: skip
