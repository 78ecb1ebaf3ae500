"""Look-ups by hash and sums by row, compared with plain dictionaries."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockd.columns.index import SEED_BYTES, Groups, Index, Seed, distinct_positions, make_seed, mix

U64 = st.integers(0, 2**64 - 1)
FEW = st.integers(0, 20)
"""Few values, so that the same key comes up several times."""


def hashes(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


def numbers(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@given(st.lists(st.tuples(st.dictionaries(FEW | U64, st.integers(0, 2**31)), st.lists(FEW | U64))))
def test_an_index_finds_what_a_dict_finds(steps: list[tuple[dict[int, int], list[int]]]) -> None:
    index, model = Index(), {}
    for added, asked in steps:
        fresh = {key: value for key, value in added.items() if key not in model}
        model |= fresh
        index.add(hashes(list(fresh)), numbers(list(fresh.values())))
        assert index.find(hashes(asked)).tolist() == [model.get(key, -1) for key in asked]
        assert len(index) == len(model)


@given(st.dictionaries(U64, FEW), st.sets(FEW))
def test_an_index_forgets_numbers(model: dict[int, int], forgotten: set[int]) -> None:
    index = Index()
    index.add(hashes(list(model)), numbers(list(model.values())))
    index.keep(np.array([number not in forgotten for number in range(21)]))
    expected = [-1 if number in forgotten else number for number in model.values()]
    assert index.find(hashes(list(model))).tolist() == expected
    index.clear()
    assert len(index) == 0
    assert (index.find(hashes(list(model))) == -1).all()


@given(st.lists(st.tuples(st.sets(FEW | U64), st.sets(FEW))))
def test_what_is_removed_is_found_no_more_and_may_come_back(steps: list[tuple[set[int], set[int]]]) -> None:
    index, model = Index(), {}
    for added, removed in steps:
        fresh = [key for key in added if key not in model]
        gone = [key for key in removed if key in model and key not in added]
        found, places = index.find_with_places(hashes(fresh))
        assert (found == -1).all()
        index.remove(hashes(gone))
        index.add(hashes(fresh), numbers(list(range(len(fresh)))), places)
        model |= {key: number for number, key in enumerate(fresh)}
        for key in gone:
            del model[key]
        asked = [*added, *removed, *model]
        assert index.find(hashes(asked)).tolist() == [model.get(key, -1) for key in asked]
        assert len(index) == len(model)


def test_keys_that_come_and_go_take_no_more_memory() -> None:
    index = Index()
    for number in range(200):
        keys = mix(np.arange(50) + 50 * number)
        index.add(keys, np.arange(50))
        assert (index.find(keys) == np.arange(50)).all()
        index.remove(keys)
    assert len(index) == 0
    assert len(index._keys) <= 256


@given(st.lists(FEW | U64))
def test_distinct_positions_is_a_position_of_every_key(values: list[int]) -> None:
    positions = distinct_positions(hashes(values)).tolist()
    assert sorted(values[position] for position in positions) == sorted(set(values))


@given(st.lists(st.tuples(FEW | st.integers(2**16 - 2, 2**32 - 1), st.integers(0, 2**40))))
def test_groups_are_what_a_loop_makes(pairs: list[tuple[int, int]]) -> None:
    sums: dict[int, int] = defaultdict(int)
    largest: dict[int, int] = defaultdict(int)
    for row, value in pairs:
        sums[row] += value
        largest[row] = max(largest[row], value)
    groups = Groups(numbers([row for row, _ in pairs]))
    values = np.array([value for _, value in pairs], np.uint64)
    rows = groups.rows.tolist()
    assert rows == sorted(sums)
    assert groups.sum(values).tolist() == [sums[row] for row in rows]
    assert groups.max(values).tolist() == [largest[row] for row in rows]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), U64), unique=True))
def test_different_rows_have_different_hashes(rows: list[tuple[int, int, int]]) -> None:
    columns = [hashes([row[i] for row in rows]) for i in range(3)]
    assert len(np.unique(mix(*columns))) == len(rows)


def test_a_million_neighbours_have_different_hashes() -> None:
    thread, address = np.arange(1000).repeat(1000), np.tile(np.arange(1000) * 64, 1000)
    hashed = mix(thread, address)
    assert len(np.unique(hashed)) == 1_000_000
    assert len(np.unique(mix(address, thread))) == 1_000_000
    assert (mix(thread, address) == hashed).all()


def test_the_order_of_columns_matters() -> None:
    assert mix(numbers([1]), numbers([2])) != mix(numbers([2]), numbers([1]))


def who_columns(tgid: int, cgroup: int, comm: bytes) -> list[np.ndarray]:
    """Return the columns of which an identity's key is made, for a process of a user."""
    words = np.frombuffer(comm.ljust(16, b"\0"), np.uint64)
    return [numbers([tgid]), numbers([cgroup]), words[:1], words[1:], numbers([0])]


VICTIM = who_columns(1234, 5821, b"postgres")
ATTACKER = who_columns(99999, 7777, b"evil0830\xa8\xc6\x0b\x8eL\x8eg")
KNOWN = Seed(np.uint64(0), np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
"""The seed for which the name of ATTACKER was computed."""


def test_a_name_that_was_chosen_for_one_seed_is_of_no_use_for_another() -> None:
    assert mix(*VICTIM, seed=KNOWN) == mix(*ATTACKER, seed=KNOWN)
    assert mix(*VICTIM) != mix(*ATTACKER)
    chance = random.Random(1)
    seeds = [make_seed(chance.randbytes(SEED_BYTES)) for _ in range(1000)]
    assert all(mix(*VICTIM, seed=seed) != mix(*ATTACKER, seed=seed) for seed in seeds)
    assert len({int(mix(*VICTIM, seed=seed)[0]) for seed in seeds}) == len(seeds)


def test_the_difference_that_a_column_has_to_make_up_for_depends_on_the_multipliers() -> None:
    """If it were the same for many seeds, a user could choose the next column without knowing any seed."""
    chance = random.Random(1)
    differences = set()
    for _ in range(1000):
        seed = make_seed(bytes(8) + chance.randbytes(SEED_BYTES - 8))
        differences.add(int((mix(numbers([1234]), seed=seed) - mix(numbers([99999]), seed=seed))[0]))
    assert len(differences) == 1000
