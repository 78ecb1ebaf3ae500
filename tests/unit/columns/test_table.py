"""A bounded table, compared with a dictionary that drops the entries that were unseen for longest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.columns.index import Hashes, Rows
from lockd.columns.table import Table

CAPACITY = 40
KEYS = st.lists(st.integers(0, 100), max_size=CAPACITY, unique=True)


class Checked:
    """A table whose rows carry their key, so that a mix-up shows."""

    def __init__(self, capacity: int) -> None:
        self.table = Table({"sum": np.int64, "word": object}, capacity)
        self.described: list[int] = []

    def rows(self, keys: list[int], now: float) -> Rows:
        asked: Hashes = np.array(keys, np.uint64)

        def describe(positions: Rows) -> dict[str, Any]:
            self.described += asked[positions].tolist()
            return {"word": [f"told {key}" for key in asked[positions]]}

        known = self.live()
        rows = self.table.find_or_add(asked, now, describe)
        fresh = [row for key, row in zip(keys, rows, strict=True) if key not in known]
        assert not self.table["sum"][fresh].any()
        assert self.table["word"][fresh].tolist() == [f"told {key}" for key in keys if key not in known]
        return rows

    def live(self) -> dict[int, float]:
        used = self.table.used
        return dict(zip(self.table["key"][used].tolist(), self.table["seen"][used].tolist(), strict=True))


@given(st.lists(KEYS))
def test_it_is_a_dict_while_there_is_room(calls: list[list[int]]) -> None:
    checked, model, known = Checked(10_000), {}, {}
    for now, keys in enumerate(calls):
        found = checked.rows(keys, now)
        assert (checked.table["key"][found] == keys).all()
        assert len(set(found.tolist())) == len(keys)
        checked.table["sum"][found] += 1
        for key, row in zip(keys, found.tolist(), strict=True):
            assert known.setdefault(key, row) == row  # a key keeps its row for good
            model[key] = model.get(key, 0) + 1
        assert dict(zip(keys, checked.table["sum"][found].tolist(), strict=True)) == {
            k: model[k] for k in keys
        }
    assert len(checked.table) == len(model)
    assert checked.described == list(dict.fromkeys(checked.described))
    unknown = np.array([1000], np.uint64)
    assert checked.table.find(unknown) == -1


@given(st.lists(KEYS, min_size=1))
def test_a_full_table_gives_up_what_was_unseen_longest(calls: list[list[int]]) -> None:
    checked, model = Checked(CAPACITY), {}
    for now, keys in enumerate(calls, 1):
        found = checked.rows(keys, now)
        assert (found >= 0).all()
        assert (checked.table["key"][found] == keys).all()
        before = dict(model)
        model |= dict.fromkeys(keys, float(now))
        live = checked.live()
        assert len(live) == len(checked.table) <= CAPACITY
        assert live.items() <= model.items()
        gone = model.keys() - live.keys()
        assert not gone & set(keys)
        if gone:
            assert len(before) + len(set(keys) - before.keys()) > CAPACITY
            stayed = [seen for key, seen in before.items() if key in live and key not in keys]
            assert max(before[key] for key in gone) <= min(stayed, default=np.inf)
        model = live


@given(st.lists(KEYS), st.integers(0, 20))
def test_what_was_unseen_since_is_forgotten(calls: list[list[int]], before: int) -> None:
    checked, model = Checked(10_000), {}
    for now, keys in enumerate(calls):
        checked.rows(keys, now)
        model |= dict.fromkeys(keys, float(now))
    checked.table.forget_unseen(before)
    assert checked.live() == {key: seen for key, seen in model.items() if seen >= before}
    checked.described.clear()
    checked.rows(list(model), 99)
    assert set(checked.described) == {key for key, seen in model.items() if seen < before}


def test_rows_that_were_just_handed_out_stay() -> None:
    """A full table keeps the keys of one call, and of calls at the same time, even if they are more than half
    of its rows."""
    checked = Checked(10)
    checked.rows([1, 2, 3, 4, 5, 6], 1.0)
    found = checked.rows([3, 4, 5, 6, 11, 12, 13, 14, 15], 2.0)
    assert checked.table["key"][found].tolist() == [3, 4, 5, 6, 11, 12, 13, 14, 15]
    assert checked.live().keys() >= {3, 4, 5, 6, 11, 12, 13, 14, 15}


@pytest.mark.parametrize("capacity", [10, 64, 1000])
def test_many_more_keys_take_no_more_memory_than_capacity(capacity: int) -> None:
    checked = Checked(capacity)
    for now in range(2 * capacity):
        checked.rows([now * 5 + i for i in range(5)], float(now))
    assert len(checked.table) <= capacity
    assert len(checked.table.used) <= max(4 * capacity, 64)
