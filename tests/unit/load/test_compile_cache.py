"""The cache of compiled programs: what is found in it is whole, and nothing wrong with a file is an error."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lockd.load import compiled
from lockd.load.compiled import (
    CompileCache,
    Compiled,
    MapDefinition,
    key_of,
    with_addresses,
    with_kernel_functions,
    with_maps,
)

KEY = key_of(("a source", "a host"))
LAYOUT = {"names": ["a"], "formats": ["u8"], "offsets": [0], "itemsize": 8}
COMPILED = Compiled(
    maps=(
        MapDefinition("numbers_0", 1, 4, 8, 64, 0, "", 3, 4, "u4", LAYOUT),
        MapDefinition("numbers", 12, 4, 4, 2, 0, "numbers_0", 0, 0, "i4", "i4"),
    ),
    functions={"on_it": bytes(range(16)), "on_nothing": b""},
    btf=b"\x9f\xeb\x01\x00",
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory of a cache that has one result in it."""
    place = tmp_path / "cache"
    CompileCache(place).add(KEY, COMPILED)
    assert CompileCache(place).find(KEY) == COMPILED
    return place


def test_nobody_else_can_read_or_write_it(directory: Path) -> None:
    assert directory.stat().st_mode & 0o777 == 0o700
    (file,) = directory.iterdir()
    assert file.name == KEY
    assert file.stat().st_mode & 0o777 == 0o600


def test_everything_that_decides_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key_of(("a", "b")), key_of(("ab", "")), key_of(("a", "b", "")), key_of(("b", "a"))}
    monkeypatch.setattr(compiled, "FORMAT", "another")
    keys.add(key_of(("a", "b")))
    assert len(keys) == 5


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def put_other_json(file: Path) -> None:
    CompileCache(file.parent).add(KEY, COMPILED)
    content = b'{"maps": [{"name": 1}], "functions": {}, "btf": ""}'
    file.write_bytes(compiled._digest(KEY, content) + b"\n" + content)


def put_a_list_for_the_functions(file: Path) -> None:
    content = b'{"maps": [], "functions": [], "btf": ""}'
    file.write_bytes(compiled._digest(KEY, content) + b"\n" + content)


def put_no_text(file: Path) -> None:
    file.write_bytes(compiled._digest(KEY, b"\xff") + b"\n\xff")


def nest_deeply(file: Path) -> None:
    content = b"[" * 100_000
    file.write_bytes(compiled._digest(KEY, content) + b"\n" + content)


def put_another_result(file: Path) -> None:
    """Replace the file with a whole result of another key."""
    other = key_of(("another source",))
    CompileCache(file.parent).add(other, COMPILED)
    os.replace(file.with_name(other), file)


def grow(file: Path) -> None:
    os.truncate(file, compiled.LARGEST + 1)


def link_it(file: Path) -> None:
    """Replace the file with a symbolic link to a file that has the right content."""
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def pipe_it(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def let_the_group_write(file: Path) -> None:
    file.chmod(0o660)


def let_all_write(file: Path) -> None:
    file.chmod(0o602)


def give_away(file: Path) -> None:
    if os.geteuid():
        pytest.skip("host: giving files away needs root")
    os.chown(file, 12345, -1)


WRONG = [
    flip_a_bit, cut, empty, put_other_json, put_a_list_for_the_functions, put_no_text, nest_deeply,
    put_another_result, grow, link_it,
    pipe_it, let_the_group_write, let_all_write, give_away,
]  # fmt: skip


@pytest.mark.parametrize("spoil", WRONG)
def test_a_file_that_is_not_what_was_written_is_replaced(
    directory: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(directory / KEY)
    with caplog.at_level(logging.INFO):
        assert CompileCache(directory).find(KEY) is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert f"{directory}/{KEY}: not used: " in record.getMessage()
    CompileCache(directory).add(KEY, COMPILED)
    assert CompileCache(directory).find(KEY) == COMPILED


@pytest.mark.parametrize("spoil", [let_the_group_write, let_all_write, give_away])
def test_a_directory_that_others_can_write_is_not_used(
    directory: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(directory)
    directory.chmod(directory.stat().st_mode | 0o500)
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    with caplog.at_level(logging.INFO):
        assert CompileCache(directory).find(KEY) is None
        CompileCache(directory).add(key_of(("another",)), COMPILED)
    warning, remark = caplog.records
    assert warning.levelno == logging.WARNING
    assert str(directory) in warning.getMessage()
    assert "belongs to user 12345" in warning.getMessage() or "others may write it" in warning.getMessage()
    assert remark.levelno == logging.INFO
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before


def no_parent(place: Path) -> Path:
    return place / "not" / "there"


def a_file(place: Path) -> Path:
    (place / "file").write_text("")
    return place / "file"


def read_only(place: Path) -> Path:
    return Path("/proc/self/fdinfo")


@pytest.mark.parametrize("make", [no_parent, a_file, read_only, lambda _: None])
def test_where_nothing_can_be_kept_nothing_fails(
    tmp_path: Path, make: Callable[[Path], Path | None], caplog: pytest.LogCaptureFixture
) -> None:
    directory = make(tmp_path)
    with caplog.at_level(logging.INFO):
        CompileCache(directory).add(KEY, COMPILED)
        assert "is not kept" in caplog.text
        assert CompileCache(directory).find(KEY) is None
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_a_write_that_fails_leaves_nothing_behind(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    (directory / KEY).unlink()
    (directory / KEY).mkdir()  # cannot be replaced by a file
    with caplog.at_level(logging.INFO):
        CompileCache(directory).add(KEY, COMPILED)
    assert "is not kept" in caplog.text
    assert [entry.name for entry in directory.iterdir()] == [KEY]


def test_only_the_newest_are_kept_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("of somebody")
    os.utime(tmp_path / "notes", (0, 0))
    keys = [key_of((str(number),)) for number in range(compiled.FILES + 5)]
    for age, key in enumerate(keys):
        CompileCache(tmp_path).add(key, COMPILED)
        os.utime(tmp_path / key, (1000 + age, 1000 + age))
        if age == 2:  # left by a process that was killed
            (tmp_path / f"{key}.0123abcd").write_text("half")
            os.utime(tmp_path / f"{key}.0123abcd", (0, 0))
    assert {file.name for file in tmp_path.iterdir()} == {"notes", *keys[-compiled.FILES :]}


def test_several_at_the_same_time(tmp_path: Path) -> None:
    """Every result that is found is whole, while several threads add it and look for it."""
    found: list[Compiled | None] = []
    go = threading.Barrier(8)

    def work() -> None:
        go.wait()
        for _ in range(50):
            CompileCache(tmp_path / "cache").add(KEY, COMPILED)
            found.append(CompileCache(tmp_path / "cache").find(KEY))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [COMPILED] * 400
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [KEY]


def test_the_directory_is_systemds_or_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/one:/var/cache/two")
    assert compiled.default_directory() == Path("/var/cache/one")
    monkeypatch.delenv("CACHE_DIRECTORY")
    assert compiled.default_directory() == (None if os.geteuid() else Path("/var/cache/lockd"))


def test_only_descriptors_of_maps_are_replaced() -> None:
    load, other = "1811000005000000 0000000000000000", "1801000005000000 1811000005000000"
    """A load of map 5, and a load of a number whose second half looks like the start of a load of map 5."""
    exit_ = "9500000000000000"
    code = bytes.fromhex(load + other + exit_)
    replaced = with_maps(code, {5: 700})
    assert replaced == bytes.fromhex("18110000bc020000 0000000000000000" + other + exit_)
    assert with_maps(replaced, {700: 5}) == code


def test_only_numbers_that_stand_for_an_address_are_replaced() -> None:
    """The upper half of such a number is 0x6c here; the lower half is an offset in the element of the map."""
    place, other = "1803000008000000 000000006c000000", "1803000008000000 000000006d000000"
    map_ = "181300006c000000 000000006c000000"
    code = bytes.fromhex(place + other + map_)
    assert with_addresses(code, {0x6C: 700}) == bytes.fromhex(
        "18230000bc020000 0000000008000000" + other + map_
    )


def test_only_calls_of_helpers_with_great_numbers_are_replaced() -> None:
    call, helper, own = "8500000007000010", "8500000007000000", "8510000007000010"
    code = bytes.fromhex(call + helper + own)
    assert with_kernel_functions(code, 0x10000000) == bytes.fromhex("8520000007000000" + helper + own)
