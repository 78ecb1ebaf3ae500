"""What programs mark in `written`, as the sampler understands it: by window, and whatever its number is."""

from __future__ import annotations

import os

import numpy as np
import pytest

from lockd.kernel.pairs import NUMBERS, Control, Written

MEMBERS = ("futex", "offcpu", "soon", "wait", "writtens")
CONTROL = [("window", "u4"), ("restraint", "u4"), ("is_timed", "u4"), ("sampler", "u4")]


def control_at(number: int) -> Control:
    value = np.zeros(1, CONTROL)
    value["window"] = number
    return Control(value)


@pytest.fixture(params=[0, 1, 6, NUMBERS - 3, NUMBERS - 1])
def control(request: pytest.FixtureRequest) -> Control:
    return control_at(request.param)


@pytest.fixture
def written(control: Control) -> Written:
    """Marked long ago, as by programs that have run for a while."""
    marks = Written(np.zeros(2 * len(MEMBERS), np.uint32), MEMBERS, control)
    marks._last[:] = (control.number - 10) % NUMBERS
    return marks


def test_programs_see_at_once_what_is_written() -> None:
    value = np.zeros(1, CONTROL)
    value["window"] = 7
    control = Control(value)
    assert (control.window, control.number) == (1, 7)
    assert value["sampler"] == os.getpid()
    control.flip()
    control.restraint, control.is_timed = 2, True
    assert value.tolist() == [(8, 2, 1, os.getpid())]
    assert (control.window, control.restraint, control.is_timed) == (0, 2, True)


def test_a_mark_is_about_one_window(control: Control, written: Written) -> None:
    assert not written.is_any
    written.mark("offcpu")
    assert written.is_any
    assert not written.is_soon
    control.flip()
    assert (written.has_ended_with("offcpu"), written.has_ended_with("futex")) == (True, False)
    assert not written.is_any
    for _ in range(3):
        control.flip()
        assert not written.has_ended_with("offcpu")
        assert not written.is_any


def test_what_is_to_be_drained_soon(control: Control, written: Written) -> None:
    written.mark("soon")
    assert written.is_soon
    control.flip()
    assert not written.is_soon
    assert written.has_ended_with("soon")


def test_a_wait_is_no_entry_and_is_known_for_a_while(control: Control, written: Written) -> None:
    """A survey in the window of the wait may have come before it, and so may one in the next: the mark of a
    program that is held up comes late."""
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
