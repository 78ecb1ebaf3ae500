"""Locks that are members of structures: each rule can be applied, and the documentation has all rules."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lockd.names.kernel.locks import RULES, as_table, member_of
from lockd.names.kernel.sites import is_locking, is_tracing

ROOT = Path(__file__).resolve().parents[3]
TYPES = (ROOT / "lockd/bpf/include/common.bpf.h").read_text()


@pytest.mark.parametrize(
    ("lock_type", "function", "member"),
    [
        ("mutex", "pipe_write", "pipe->mutex"),
        ("mutex", "anon_pipe_read", "pipe->mutex"),
        ("mutex", "__fdget_pos", "file->f_pos_lock"),
        ("rwsem_write", "do_unlinkat", "inode->i_rwsem"),
        ("rwsem_read", "iterate_dir", "inode->i_rwsem"),
        ("mutex", "lock_rename", "sb->s_vfs_rename_mutex"),
        ("rwsem_write", "lock_rename", "inode->i_rwsem"),
        ("rwsem_read", "__access_remote_vm", "mmap_lock"),
        ("spinlock", "pipe_write", ""),
        ("mutex", "vfs_read", ""),
        ("mutex", "", ""),
    ],
)
def test_a_lock_is_told_by_its_type_and_who_takes_it(lock_type: str, function: str, member: str) -> None:
    assert member_of(lock_type, function) == member


def test_rules_do_not_contradict_each_other() -> None:
    told = Counter(
        (lock_type, function)
        for rule in RULES
        for lock_type in rule.types
        for function in rule.functions.split()
    )
    assert [one for one, count in told.items() if count > 1] == []


def test_rules_are_about_types_that_are_measured_and_functions_that_are_seen() -> None:
    for rule in RULES:
        for lock_type in rule.types:
            assert f"LOCK_{lock_type.upper()}" in TYPES
        for function in rule.functions.split():
            assert not is_locking(function), function
            assert not is_tracing(function), function


def test_the_documentation_has_every_rule() -> None:
    assert as_table() in (ROOT / "docs/kernel-lock-names.md").read_text()
