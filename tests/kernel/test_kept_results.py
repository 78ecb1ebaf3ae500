"""Only the first start compiles. Later starts load what it kept, which gives the same programs."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import Manifest
from lockd.load.child import run_loader
from lockd.load.settings import LoadSettings
from tests.kernel.test_layout import SETTINGS
from tests.support.lockd_process import CHECKOUT, ROOT, Lockd
from tests.support.workload import Start

pytestmark = pytest.mark.untimed

TAG_AT, TAG_BYTES = 8, 8
"""Offset and size of the tag, a hash of the instructions, in struct bpf_prog_info."""
COMPILED, KEPT = "compiled the BPF programs", "compiled by an earlier start"
LOAD = f"""
import json, os, sys
from lockd.load.loader import load
from lockd.load.settings import LoadSettings

settings = LoadSettings.from_json({SETTINGS.to_json()!r})
load(settings)
maps = open("/proc/self/maps").read()
print(json.dumps(["bcc" in sys.modules, "libbcc" in maps, "libLLVM" in maps or "libclang" in maps]))
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("CACHE_DIRECTORY", str(place))
    return place


def loaded(settings: LoadSettings = SETTINGS) -> tuple[Manifest, list[str]]:
    """Return the loader's manifest without its time, and the tag of each program in the kernel."""
    manifest, fds = run_loader(settings)
    first = len(manifest.maps)
    tags = [_tag(fd) for fd in fds[first : first + len(manifest.functions)]]
    for fd in fds:
        os.close(fd)
    return replace(manifest, attached_ns=0), tags


def _tag(fd: int) -> str:
    info = np.zeros(256, np.uint8)
    size = ctypes.c_uint32(info.nbytes)
    assert libbpf().bpf_obj_get_info_by_fd(fd, info.ctypes.data, ctypes.byref(size)) == 0
    return info[TAG_AT : TAG_AT + TAG_BYTES].tobytes().hex()


def said(caplog: pytest.LogCaptureFixture) -> list[bool]:
    """Return, for each start in the log, whether it compiled."""
    with_words = [record.getMessage() for record in caplog.records]
    return [COMPILED in words for words in with_words if COMPILED in words or KEPT in words]


def test_the_second_start_loads_the_same(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        first, second = loaded(), loaded()
    assert said(caplog) == [True, False]
    assert len(list(directory.iterdir())) == 1
    assert first == second
    _, tags = first
    assert len(set(tags)) > 5


def test_only_the_first_start_has_the_compiler_in_memory(directory: Path) -> None:
    seen = [
        json.loads(subprocess.check_output([sys.executable, "-c", LOAD], cwd=ROOT, text=True))
        for _ in range(2)
    ]
    assert seen[0][:2] == [True, True]
    assert seen[1] == [False, False, False]


@pytest.mark.thorough("it compiles for seconds")
def test_other_settings_are_compiled_too(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for entries in (1024, 2048, 1024, 2048):
            manifest, _ = loaded(replace(SETTINGS, entries=entries))
            assert {one.entries for one in manifest.maps if one.name == "futex_0"} == {entries}
    assert said(caplog) == [True, True, False, False]


@pytest.mark.thorough("it compiles for ten seconds")
def test_what_was_spoilt_is_compiled_again(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = loaded()
    (file,) = directory.iterdir()
    content = file.read_bytes()
    for spoilt in (content[:-100], content.replace(b'"maps"', b'"mops"'), b""):
        file.write_bytes(spoilt)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert loaded() == whole
        assert said(caplog) == [True]
        assert "not used" in caplog.text
        assert file.read_bytes() == content


def test_nothing_is_read_from_a_directory_of_another_user(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    with caplog.at_level(logging.INFO):
        first, second = loaded(), loaded()
    assert first == second
    assert said(caplog) == [True, True]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert all(f"{directory}: not used: it belongs to user 12345" in words for words in warnings)


def test_a_directory_that_is_read_only_is_no_error(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(0o700)
    script = f'mount --bind {directory} {directory}; mount -o remount,bind,ro {directory}; exec "$@"'
    daemon = Lockd(tmp_path, program=["unshare", "--mount", "sh", "-ec", script, "-", *CHECKOUT])
    assert daemon.stop() == 0, "".join(daemon.log)
    assert any(re.search("info.*not kept: Read-only file system", line) for line in daemon.log), daemon.log
    assert list(directory.iterdir()) == []


@pytest.mark.thorough("all of them compile, for seconds")
def test_daemons_that_start_at_the_same_time(directory: Path, tmp_path: Path, workload: Start) -> None:
    with ExitStack() as running:

        def start(number: int) -> Lockd:
            place = tmp_path / str(number)
            place.mkdir()
            return running.enter_context(Lockd(place))

        with ThreadPoolExecutor(3) as pool:
            daemons = list(pool.map(start, range(3)))
        daemons.append(start(3))
        assert any(KEPT in line for line in daemons[-1].log)
        assert len(list(directory.iterdir())) == 1
        one = workload("mutex_handover", 20, 1000)
        truth = one.run()["futex"]["lock"]
        for daemon in daemons:
            found = daemon.metrics().sum("lockd_futex_blocked_seconds_count", comm=one.comm, kind="lock")
            assert found == truth["blocked"] == 20
        one.finish()
        assert [daemon.stop() for daemon in daemons] == [0] * 4
