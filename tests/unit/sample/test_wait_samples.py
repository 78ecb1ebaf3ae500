"""Sampled waits off the CPU: how stacks are recognised, and what the namer is asked about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lockd.kernel.maps import HashMap
from lockd.names.client import Resolver
from lockd.names.protocol import Question, StackAnswer, ThreadCaptured
from lockd.sample import wait_samples
from lockd.sample.aggregates.wait_stacks import CallStack
from lockd.sample.locks.releases import ANSWER_SECONDS, MOST_WEIGHT_NS, SampleCounts, SamplePace
from lockd.sample.locks.runtimes import CPYTHON, RuntimePlaces
from lockd.sample.wait_samples import (
    AGAIN_SECONDS,
    FEW_NEW,
    MOST_OF_PLACE,
    REMEMBERED_SECONDS,
    UNKNOWN_STACK,
    NamedStack,
    RememberedStacks,
    WaitSamples,
    _Begun,
    _Completed,
    captures_wanted,
    find_returns,
)
from tests.support.maps import Map

WORDS = 512
REGISTERS = [*(f"r{n}" for n in range(8, 16)), "ax", "dx", "cx", "bx", "si", "di", "bp", "sp", "ip"]
CAPTURE = np.dtype(
    [
        ("registers", [(name, "u8") for name in REGISTERS]),
        ("thread_pointer", "u8"),
        ("frames", "u8", 24),
        ("tid", "u4"),
        ("tgid", "u4"),
        ("bytes", "u4"),
        ("stack", "u1", 8 * WORDS),
    ]
)
TGID, PLACE, READ, MAIN, START = 7, 0x1000, 0x2000, 0x3000, 0x4000
KERNEL = (0xFF10, 0xFF20)


class Asked(Resolver):
    """Keeps the questions instead of sending them to a namer, which rests if there is to be none."""

    def __init__(self, is_resting: bool = False) -> None:
        super().__init__(quiet_seconds=-1.0 if is_resting else 1e9)
        self.questions: list[ThreadCaptured] = []
        self.needed = 0
        """How many of them needed an answer."""

    def ask(self, question: Question, is_needed: bool = True) -> bool:
        assert isinstance(question, ThreadCaptured)
        if not super().ask(question, is_needed):
            return False
        self.questions.append(question)
        self.needed += is_needed
        return True


def captured(stack: dict[int, int], place: int = PLACE, frames: tuple[int, ...] = (), tid: int = 9) -> Any:
    """A capture whose stack has these words, at these positions; other words differ each time."""
    capture = np.zeros(1, CAPTURE)
    words = np.random.default_rng().integers(1 << 40, 1 << 41, WORDS).astype(np.uint64)
    for at, word in stack.items():
        words[at] = word
    capture["stack"][0] = words.view(np.uint8)
    capture["bytes"], capture["tid"], capture["registers"]["ip"] = 8 * WORDS, tid, place
    capture["frames"][0][: len(frames)] = frames
    return capture


def test_a_stack_is_recognised_by_its_return_addresses() -> None:
    words = memoryview(np.array([5, READ, 6, 7, MAIN, START], np.uint64))
    stack = find_returns(words, (), (PLACE, READ, MAIN, START))
    assert stack
    assert stack.returns == ((1, READ), (4, MAIN), (5, START))
    assert stack.is_same(memoryview(np.array([8, READ, 0, 0, MAIN, START, 9], np.uint64)), ())
    for other in ([8, READ, 0, 0, MAIN, 9], [READ, 8, 0, 0, MAIN, START], [8, READ, 0, 0, MAIN]):
        assert not stack.is_same(memoryview(np.array(other, np.uint64)), ())


def test_a_return_address_beyond_the_capture_is_one_that_the_kernel_found() -> None:
    words = memoryview(np.array([READ, 6], np.uint64))
    assert find_returns(words, (), (PLACE, READ, MAIN)) is None
    stack = find_returns(words, (READ, MAIN), (PLACE, READ, MAIN))
    assert stack
    assert stack.is_same(words, (READ, MAIN))
    assert not stack.is_same(words, (READ, START))


def test_the_namer_is_asked_about_new_stacks_only() -> None:
    resolver = Asked()
    names, stack = RememberedStacks(resolver), {3: READ, 10: MAIN}
    first = names.name(TGID, captured(stack), KERNEL, 1.0)
    (question,) = resolver.questions
    assert question.kernel == KERNEL
    assert question.capture
    assert question.capture.registers[-1] == PLACE
    assert not first.is_ready(1.0)
    answer = StackAnswer(
        question.token, ("read", "fetch", "main"), (PLACE, READ, MAIN), ("schedule", "read"), ()
    )
    names.note_answer(answer, 1.1)
    assert first.is_ready(1.1)
    assert first.functions == CallStack(("read", "fetch", "main"), ("schedule", "read"))
    again = names.name(TGID, captured(stack), KERNEL, 2.0)
    assert again.functions == first.functions
    assert len(resolver.questions) == 1
    for tgid, other in (
        (TGID, captured({3: READ, 11: MAIN})),
        (TGID, captured(stack, place=PLACE + 1)),
        (TGID + 1, captured(stack)),
    ):
        assert not names.name(tgid, other, KERNEL, 2.0).is_ready(2.0)
        assert resolver.questions[-1].capture
        assert resolver.questions[-1].kernel == ()  # this part is known
    assert names.name(TGID, captured(stack), (0xFF30,), 2.0).user == first.user
    assert resolver.questions[-1].capture is None


STACK = {3: READ, 10: MAIN}
NAMED = ("read", "fetch", "main"), (PLACE, READ, MAIN), ("schedule", "read"), ()
"""The namer's answer for it: functions, return addresses, functions of the kernel, and no interrupts."""


def named_once(
    resolver: Asked, *answer: tuple[Any, ...], kernel: tuple[int, ...] = KERNEL
) -> RememberedStacks:
    """One stack is known since second 1, and expires at `EXPIRES`. Later questions are for `resolver`."""
    first = Asked()
    names = RememberedStacks(first)
    names.name(TGID, captured(STACK), kernel, 1.0)
    names.note_answer(StackAnswer(first.questions[-1].token, *(answer or NAMED)), 1.0)
    names._resolver = resolver
    return names


EXPIRES = 1.0 + REMEMBERED_SECONDS
CALLS = CallStack(("read", "fetch", "main"), ("schedule", "read"))


def test_an_old_stack_is_used_at_once_and_asked_again() -> None:
    resolver = Asked()
    names = named_once(resolver)
    assert names.name(TGID, captured(STACK), KERNEL, EXPIRES - 0.1).functions == CALLS
    assert not resolver.questions
    for later in (0.0, 0.1, AGAIN_SECONDS - 0.1):
        assert names.name(TGID, captured(STACK), KERNEL, EXPIRES + later).functions == CALLS
        assert len(resolver.questions) == 1, "once"
    assert resolver.needed == 0
    again = resolver.questions[-1]
    assert again.kernel == KERNEL
    assert again.capture
    answer = ("compiled", "main"), (PLACE, MAIN), ("schedule", "write"), ()
    names.note_answer(StackAnswer(again.token, *answer), EXPIRES + 1.0)
    new = names.name(TGID, captured(STACK), KERNEL, EXPIRES + 2.0)
    assert new.functions == CallStack(("compiled", "main"), ("schedule", "write"))
    assert names.name(TGID, captured(STACK), KERNEL, EXPIRES + REMEMBERED_SECONDS).is_ready(0.0)
    assert len(resolver.questions) == 1


def test_what_was_given_out_does_not_change_with_a_later_answer() -> None:
    resolver = Asked()
    names = named_once(resolver)
    given = names.name(TGID, captured(STACK), KERNEL, EXPIRES)
    token = resolver.questions[-1].token
    names.note_answer(StackAnswer(token, (), (), ("timer", "irq"), (KERNEL[0],)), EXPIRES)
    assert given.functions == CALLS
    assert not given.is_interrupt
    assert names.name(TGID, captured(STACK), KERNEL, EXPIRES).is_interrupt


def test_an_old_stack_stays_if_the_namer_could_not_look_at_it() -> None:
    """It had no time, or died."""
    resolver = Asked()
    names = named_once(resolver)
    for number in range(3):
        now = EXPIRES + number * AGAIN_SECONDS
        assert names.name(TGID, captured(STACK), KERNEL, now).functions == CALLS
        assert len(resolver.questions) == 1 + number
        answer = resolver.questions[-1].fallback()
        assert isinstance(answer, StackAnswer)
        names.note_answer(answer, now)


def test_an_old_stack_goes_if_the_namer_finds_other_code_there() -> None:
    resolver = Asked()
    names = named_once(resolver)
    names.name(TGID, captured(STACK), KERNEL, EXPIRES)
    token = resolver.questions[-1].token
    names.note_answer(StackAnswer(token, UNKNOWN_STACK, (PLACE,), ("schedule",), ()), EXPIRES)
    assert not names.name(TGID, captured(STACK), KERNEL, EXPIRES).is_ready(EXPIRES)
    assert len(resolver.questions) == 2


def test_a_stack_that_is_seen_again_and_again_needs_no_namer() -> None:
    resolver = Asked(is_resting=True)
    names = named_once(resolver)
    now = 1.0
    while now < 100 * REMEMBERED_SECONDS:
        now += REMEMBERED_SECONDS
        names.forget_ended({TGID}, now)
        assert names.name(TGID, captured(STACK), KERNEL, now).functions == CALLS
    assert not resolver.questions


def test_an_interrupted_waker_needs_no_namer_either() -> None:
    resolver = Asked(is_resting=True)
    names = named_once(resolver, ("main",), (PLACE,), ("timer", "irq"), (KERNEL[1],))
    for times in range(1, 100):
        names.forget_ended({TGID}, 1.0 + times * REMEMBERED_SECONDS)
        assert names.name(TGID, captured(STACK), KERNEL, 1.0 + times * REMEMBERED_SECONDS).is_interrupt
    assert not resolver.questions
    resolver = Asked()
    names = named_once(resolver, ("main",), (PLACE,), ("timer", "irq"), (KERNEL[1],))
    assert names.name(TGID, captured(STACK), KERNEL, EXPIRES).is_interrupt
    (again,) = resolver.questions
    assert (again.kernel, again.capture, resolver.needed) == (KERNEL, None, 0)
    names.note_answer(StackAnswer(again.token, (), (), ("schedule", "read"), ()), EXPIRES)  # a module went
    assert not names.name(TGID, captured(STACK), KERNEL, EXPIRES).is_interrupt


def test_a_new_stack_needs_a_namer_when_it_is_seen_again() -> None:
    resolver = Asked(is_resting=True)
    names = RememberedStacks(resolver)
    for tgid, needed in ((TGID, 0), (TGID + 1, 0), (TGID, 1)):
        stack = names.name(tgid, captured(STACK), (), 1.0)
        assert (len(resolver.questions), resolver.needed) == (needed, needed)
        assert stack.is_ready(1.0) == (needed == 0), "without a namer it is unknown at once"
    names.forget_ended(set(), 1.0 + REMEMBERED_SECONDS)
    names.name(TGID, captured(STACK), (), 1.0 + REMEMBERED_SECONDS)
    assert resolver.needed == 1, "that was too long ago"


def test_a_new_stack_of_the_kernel_needs_a_namer_when_it_is_seen_again() -> None:
    resolver = Asked(is_resting=True)
    names = named_once(resolver)
    for tgid, kernel, needed in ((TGID, 0xFF30, 0), (TGID, 0xFF31, 0), (TGID + 1, 0xFF30, 1)):
        names.name(tgid, captured({}, tid=0), (kernel,), 1.0)
        assert resolver.needed == needed


def test_many_new_stacks_within_a_minute_need_a_namer() -> None:
    resolver = Asked(is_resting=True)
    names = RememberedStacks(resolver)
    for number in range(100):
        names.name(number, captured(STACK), (), 1.0 + number * 60.0 / FEW_NEW)
    assert resolver.needed == 0
    now = 10_000.0
    needed = []
    for number in range(2 * FEW_NEW):
        names.name(1000 + number, captured(STACK), (), now + number)
        needed.append(resolver.needed)
    assert needed == [0] * FEW_NEW + list(range(1, FEW_NEW + 1))


def test_a_stack_that_is_not_seen_any_more_is_forgotten() -> None:
    resolver = Asked()
    names = named_once(resolver)
    names.name(TGID, captured({5: READ}), (0xFF70,), 1.0)
    answer = StackAnswer(resolver.questions[-1].token, ("read", "main"), (PLACE, READ), ("irq",), (0xFF70,))
    names.note_answer(answer, 1.0)
    names.forget_ended({TGID}, EXPIRES + REMEMBERED_SECONDS - 0.1)
    assert (len(names._user[TGID]), names._remembered) == (1, 1)
    names.forget_ended({TGID}, EXPIRES + REMEMBERED_SECONDS)
    assert (names._user, names._remembered, names._kernel, names._interrupts) == ({}, 0, {}, {})


def test_stacks_of_the_kernel_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_samples, "MOST_REMEMBERED", 2)
    resolver = Asked()
    names = RememberedStacks(resolver)
    for at in range(3):
        names.name(TGID, captured({}, tid=0), (at,), 1.0)
        names.note_answer(StackAnswer(resolver.questions[-1].token, (), (), (f"f{at}",), ()), 1.0)
    ready = [names.name(TGID, captured({}, tid=0), (at,), 1.0).is_ready(1.0) for at in range(3)]
    assert ready == [False, True, True]


def test_stacks_of_python_are_told_apart_by_their_functions() -> None:
    """The functions in C are the same whichever Python functions they evaluate."""
    resolver, table = Asked(), Map("u4", [(name, "u8") for name in CPYTHON])
    names = RememberedStacks(resolver, RuntimePlaces(cast("HashMap", table), CPYTHON))
    stack = {3: READ, 10: MAIN}
    for at, codes in enumerate(((0x51, 0x52), (0x53, 0x52), ())):
        named = names.name(TGID, captured(stack), (), 1.0, codes)
        question = resolver.questions[-1]
        assert (len(resolver.questions), question.python) == (at + 1, codes)
        functions = ("read", f"app.py:{at}", "app.py:<module>")
        answer = StackAnswer(
            question.token, functions, (PLACE, READ, MAIN), (), (), (1 << 40, *range(len(CPYTHON) - 1))
        )
        names.note_answer(answer, 1.0)
        assert named.functions == CallStack(functions, ())
        assert names.name(TGID, captured(stack), (), 1.0, codes).functions == named.functions
    assert len(resolver.questions) == 3
    (places,) = table.held.values()
    assert tuple(places.tolist()) == (1 << 40, *range(len(CPYTHON) - 1))


def test_a_kernel_thread_has_no_user_stack() -> None:
    resolver = Asked()
    stack = RememberedStacks(resolver).name(TGID, captured({}, tid=0), (), 1.0)
    assert stack.is_ready(1.0)
    assert stack.functions == CallStack((), ())
    assert not resolver.questions


def test_a_waker_that_was_interrupted_is_known_without_a_question() -> None:
    resolver = Asked()
    names = RememberedStacks(resolver)
    interrupted = names.name(TGID, captured({3: READ}), (0xFF30, 0xFF40, 0xFF50), 1.0)
    token = resolver.questions[-1].token
    names.note_answer(StackAnswer(token, ("main",), (PLACE,), ("timer", "irq", "read"), (0xFF40,)), 1.0)
    assert interrupted.is_interrupt
    again = names.name(TGID, captured({4: READ}), (0xFF31, 0xFF40), 2.0)
    assert again.is_ready(2.0)
    assert again.is_interrupt
    assert len(resolver.questions) == 1


def test_a_stack_that_is_not_named_in_time_is_unknown() -> None:
    names = RememberedStacks(Asked())
    stack = names.name(TGID, captured({3: READ}), KERNEL, 1.0)
    assert not stack.is_ready(0.9 + ANSWER_SECONDS)
    assert stack.is_ready(1.0 + ANSWER_SECONDS)
    assert stack.functions == CallStack(UNKNOWN_STACK, ())


def test_what_the_namer_could_not_read_is_not_remembered() -> None:
    resolver = Asked()
    names = RememberedStacks(resolver)
    for asked in (1, 2):
        stack = names.name(TGID, captured({3: READ}), KERNEL, 1.0)
        assert len(resolver.questions) == asked
        token = resolver.questions[-1].token
        names.note_answer(StackAnswer(token, UNKNOWN_STACK, (PLACE,), ("schedule",), ()), 1.0)
        assert stack.functions == CallStack(UNKNOWN_STACK, ("schedule",))


def test_few_stacks_of_one_place_are_remembered() -> None:
    resolver = Asked()
    names = RememberedStacks(resolver)
    for at in range(MOST_OF_PLACE + 10):
        names.name(TGID, captured({at: READ}), (), 1.0)
        token = resolver.questions[-1].token
        names.note_answer(StackAnswer(token, ("read", "main"), (PLACE, READ), (), ()), 1.0)
    assert len(resolver.questions) == MOST_OF_PLACE + 10
    assert [names.name(TGID, captured({at: READ}), (), 1.0).is_ready(1.0) for at in (9, 10)] == [False, True]


def test_stacks_of_ended_processes_are_forgotten() -> None:
    resolver = Asked()
    names = RememberedStacks(resolver)
    names.name(TGID, captured({3: READ}), (), 1.0)
    token = resolver.questions[-1].token
    names.note_answer(StackAnswer(token, ("read", "main"), (PLACE, READ), (), ()), 1.0)
    names.forget_ended({TGID}, 1.0)
    assert names.name(TGID, captured({3: READ}), (), 1.0).is_ready(1.0)
    names.forget_ended(set(), 1.0)
    assert not names.name(TGID, captured({3: READ}), (), 1.0).is_ready(1.0)


def test_a_pace_takes_another_rate() -> None:
    pace, now = SamplePace(10, 0.0), 0.0
    pace.set_rate(1)
    for _ in range(200):
        now += 0.05
        pace.note(10 if pace.wait_ns < 4_000_000_000 else 0, now)
    assert 1_000_000_000 <= pace.wait_ns <= 8_000_000_000
    pace.set_rate(10)
    for _ in range(200):
        now += 0.05
        pace.note(0, now)
    assert pace.wait_ns == 100_000_000


def test_what_waits_for_functions_at_the_end_counts_as_refused() -> None:
    samples = WaitSamples.__new__(WaitSamples)
    SampleCounts.__init__(samples, cast("Any", None), SamplePace(1, 0.0))
    stack = NamedStack(0.0, (), ())
    samples._waiting = [_Completed(("u", "c"), "sleep", weight, stack, "", stack, 0) for weight in (5, 7)]
    samples.refuse_waiting()
    assert samples.refused_here == (2, 12)
    assert not samples.has_waiting


def test_a_wait_that_has_ended_without_a_sample_is_forgotten() -> None:
    """A sample may be on its way when the thread is looked at, but not when it is looked at once more."""
    samples = WaitSamples.__new__(WaitSamples)
    stack = NamedStack(0.0, (), ())
    samples._begun = {1: _Begun(100, stack), 2: _Begun(200, stack), 3: _Begun(300, stack)}
    tids, threads = np.array([1, 2], np.uint32), np.zeros(2, [("off_since", "u8")])
    threads["off_since"] = 100, 250  # thread 2 waits for something else, and thread 3 is gone
    samples.forget_ended_waits((tids, threads))
    assert set(samples._begun) == {1, 2, 3}
    samples._begun[2] = _Begun(250, stack)
    samples.forget_ended_waits((tids, threads))
    assert set(samples._begun) == {1, 2}
    samples.forget_ended_waits((tids, threads))
    assert set(samples._begun) == {1, 2}


@pytest.mark.parametrize(("began", "weight_ns"), [(200, MOST_WEIGHT_NS + 1), (200, 0), (100, 1000)])
def test_a_record_of_another_wait_does_not_end_the_one_that_has_begun(began: int, weight_ns: int) -> None:
    """On arm64 a new record may be read with the content of an older one."""
    samples = WaitSamples.__new__(WaitSamples)
    SampleCounts.__init__(samples, cast("Any", None), SamplePace(1, 0.0))
    samples._begun, samples._waiting = {1: _Begun(200, NamedStack(0.0, (), ()))}, []
    samples._identify = cast("Any", lambda _: (None, True))
    fields = {"tid": 1, "waker": 0, "weight": weight_ns, "began": began, "who": 0}
    samples._note_end(fields, memoryview(b""), 0.0, 0)
    assert (set(samples._begun), samples.taken) == ({1}, 0)


def test_a_quiet_host_has_fewer_captures_than_configured() -> None:
    assert [captures_wanted(20, waits) for waits in (0, 60, 300, 600, 100_000)] == [2, 2, 10, 20, 20]
    assert [captures_wanted(200, waits) for waits in (0, 60, 300, 600, 100_000)] == [20, 20, 100, 200, 200]
    assert captures_wanted(1, 0) == 1


def test_waits_that_are_counted_every_ten_seconds_have_a_steady_rate() -> None:
    rates: list[int] = []
    samples = WaitSamples.__new__(WaitSamples)
    samples._reader = cast("Any", SimpleNamespace(records=tuple))
    samples._control = cast("Any", SimpleNamespace(set_wait_per_capture=lambda _: None))
    samples._pace = cast("Any", SimpleNamespace(set_rate=rates.append, note=lambda *_: None, wait_ns=0))
    samples._per_second, samples._since, samples._waits_then = 20, 0.0, 0
    for second in range(1, 50):
        samples.read(float(second), second, 3000 * min(second // 10, 3))
    assert rates == [10, 10, 10, 2]
