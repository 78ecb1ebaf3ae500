"""Waits for a lock that is being looked up are held back until its kind is known, and count under that kind.

They do not count under the kind that they look like.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from bench.sampler import CONFIG, Filled

ANSWER_SECONDS = 30.0


@pytest.fixture
def filled(host: None) -> Iterator[Filled]:
    filled = Filled(CONFIG)
    yield filled
    filled.sampler.close()


def counted(filled: Filled) -> int:
    assert filled.sampler.futex
    return int(filled.sampler.futex.by_kind["slots"].sum())


def undecided(filled: Filled) -> int:
    return filled.sampler._folding.undecided_calls


def test_also_those_of_a_process_that_has_just_begun_as_others_are_forgotten(filled: Filled) -> None:
    maps = filled.sampler._collector._maps
    filled.settle()
    filled.fill(1)
    captures = maps.idle("captures")
    key, value = np.zeros(1, captures.key), np.zeros(1, captures.value)
    keys, values = maps.idle("futex").read(maps.buffers)
    key["uaddr"], key["tgid"] = keys["uaddr"], values["who"]["tgid"]
    captures.update(key, value)
    filled.sampler.tick()  # the first tick also forgets the locks of processes that have ended
    filled.sampler.fold()
    assert (undecided(filled), counted(filled)) == (1, 0)
    deadline = time.monotonic() + ANSWER_SECONDS
    while undecided(filled):
        assert time.monotonic() < deadline
        time.sleep(0.01)
        filled.sampler.tick()
        filled.sampler.fold()
    assert counted(filled) == 1
