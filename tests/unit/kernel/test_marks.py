"""The marks of programs in the map `written`, as the sampler reads them: by window, whatever its number
is."""

from __future__ import annotations

import os

import numpy as np
import pytest

from lockd.kernel.pairs import ELEMENT_WORDS, NUMBERS, Control, Words, Written

MEMBERS = ("futex", "offcpu", "soon", "processes", "wait", "writtens")
CONTROL = [("window", "u4"), ("restraint", "u4"), ("is_timed", "u4"), ("sampler", "u4"), ("exporter", "u4")]


def words(*numbers: int) -> Words:
    """Return memory like that of an array map."""
    return memoryview(np.array(numbers, np.uint32))


@pytest.fixture(params=[0, 1, 6, NUMBERS - 3, NUMBERS - 1])
def control(request: pytest.FixtureRequest) -> Control:
    return Control(words(request.param, 0, 0, 0, 0), CONTROL)


@pytest.fixture
def written(control: Control) -> Written:
    """Return marks of ten windows ago, as of programs that have run for a while."""
    long_ago = (control.number - 10) % NUMBERS
    return Written(words(*[long_ago] * 2 * ELEMENT_WORDS * len(MEMBERS)), MEMBERS, control)


def test_programs_see_at_once_what_is_written() -> None:
    memory = words(7, 0, 0, 0, 0)
    control = Control(memory, CONTROL)
    assert (control.window, control.number) == (1, 7)
    control.flip()
    control.restraint = 2
    control.set_timed(True)
    control.set_exporter(1234)
    assert memory.tolist() == [8, 2, 1, os.getpid(), 1234]
    assert (control.window, control.restraint) == (0, 2)


def test_the_beginning_and_end_of_a_trace_are_told_beside_the_window() -> None:
    memory = words(7, 0, 0, 0, 0, 0)
    control = Control(memory, [*CONTROL, ("is_tracing", "u4")])  # a member in the programs of a trace only
    control.set_tracing(True)
    assert memory.tolist() == [7, 0, 0, os.getpid(), 0, 1]
    control.set_tracing(False)
    assert memory.tolist() == [7, 0, 0, os.getpid(), 0, 0]


def test_a_mark_is_about_one_window(control: Control, written: Written) -> None:
    assert not written.is_any
    written.mark("offcpu")
    assert written.is_any
    assert not written.has("soon")
    control.flip()
    assert (written.has_ended_with("offcpu"), written.has_ended_with("futex")) == (True, False)
    assert not written.is_any
    for _ in range(3):
        control.flip()
        assert not written.has_ended_with("offcpu")
        assert not written.is_any


@pytest.mark.parametrize("what", ["offcpu", "soon", "processes"])
def test_each_has_its_own_mark(what: str, control: Control, written: Written) -> None:
    written.mark(what)
    assert [one for one in MEMBERS if written.has(one)] == [what]
    control.flip()
    assert not written.has(what)
    assert [one for one in MEMBERS if written.has_ended_with(one)] == [what]


def test_a_wait_is_no_entry_and_is_known_for_a_while(control: Control, written: Written) -> None:
    """A survey in the window of the wait may have come before the wait. So may a survey in the next window,
    because the mark of a program that is held up comes late."""
    surveyed = control.number
    assert not written.has_wait_since(surveyed)
    written.mark("wait")
    assert not written.is_any
    assert written.has_wait_since(surveyed)
    control.flip()
    assert written.has_wait_since(surveyed)
    assert written.has_wait_since(control.number)
    control.flip()
    assert written.has_wait_since(surveyed)
    assert not written.has_wait_since(control.number)
