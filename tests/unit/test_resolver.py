"""Names of locks, asked for and fetched later."""

from __future__ import annotations

import time
from pathlib import Path

from lockd.names.resolver import MODULES_SECONDS, Answer, Request, Resolver

LOCK = 0xFFFFFFFFC0001000


def named(resolver: Resolver, request: Request) -> Answer:
    assert resolver.ask(1, request)
    deadline = time.monotonic() + 30
    while not (answers := resolver.answers()):
        assert time.monotonic() < deadline, "no answer"
        time.sleep(0.01)
    (answer,) = answers
    return answer


def test_a_module_that_was_loaded_later_has_names_too(tmp_path: Path) -> None:
    kallsyms, modules = tmp_path / "kallsyms", tmp_path / "modules"
    before = "ffffffff82000000 D init_task\nffffffffc0000000 d other_lock\t[other]\n"
    kallsyms.write_text(before)
    modules.write_text("other 16384 2 - Live 0xffffffffc0000000\n")
    resolver = Resolver(tmp_path)
    assert named(resolver, Request(0, LOCK)).lock == "other_lock+0x1000"

    kallsyms.write_text(before + "ffffffffc0001000 d registry_lock\t[new]\n")
    modules.write_text("new 16384 0 - Live 0xffffffffc0001000\nother 16384 3 - Live 0xffffffffc0000000\n")
    time.sleep(2 * MODULES_SECONDS)
    assert named(resolver, Request(0, LOCK)).lock == "registry_lock"


def test_a_kernel_without_modules_has_names(tmp_path: Path) -> None:
    (tmp_path / "kallsyms").write_text("ffffffff82000000 D init_task\nffffffff82000100 d tasklist_lock\n")
    assert named(Resolver(tmp_path), Request(0, 0xFFFFFFFF82000100)).lock == "tasklist_lock"
