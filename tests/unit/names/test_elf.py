"""Object files: names and unwinding rules in real ones, and bounds for those that were made to do harm."""

from __future__ import annotations

import lzma
import os
import struct
import subprocess
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from lockd.names.objects import elfutils
from lockd.names.objects.elfutils import MAX_SECTIONS, MAX_SEGMENTS, SHT_NOTE, Elf, ElfError
from lockd.names.objects.object_file import (
    MAX_FUNCTION_BYTES,
    MAX_RULE_BYTES,
    ObjectFile,
    functions_by_name,
)
from tests.needs import needs

SOURCE = """
long first[20];
static long hidden;
__thread long own, other;
int plain(void) { return first[0]; }
int _underlined(void) __attribute__((alias("plain")));
int a_longer_alias(void) __attribute__((alias("plain")));
static int local_one(void) __attribute__((alias("plain"), used));
__asm__(".text\\n.globl handwritten\\nhandwritten: nop; nop; ret\\n");
int main(void) { return plain() + hidden + own + other; }
"""

pytestmark = needs("gcc", "nm", "objcopy", "strip")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("elf")
    (directory / "program.c").write_text(SOURCE)
    subprocess.run(["gcc", "-O0", "-o", directory / "program", directory / "program.c"], check=True)
    return directory / "program"


def addresses(program: Path) -> dict[str, int]:
    lines = subprocess.run(["nm", program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {fields[2]: int(fields[0], 16) for line in lines if len(fields := line.split()) == 3}


def opened(path: Path) -> ObjectFile:
    return ObjectFile(Elf(os.open(path, os.O_RDONLY | os.O_CLOEXEC)))


def test_symbols(program: Path) -> None:
    file, at = opened(program), addresses(program)
    found = [file.function(at["plain"] + offset) for offset in (0, 1)]
    assert [f and f.name for f in found] == ["plain", "plain"], "the public, plain and shortest of four names"
    first = file.variable(at["first"] + 159)
    assert first
    assert (first.name, first.address, first.size) == ("first", at["first"], 160)
    assert file.variable(at["first"] + 160) != first
    assert (variable := file.variable(at["hidden"]))
    assert variable.name == "hidden"
    assert file.variable(at["plain"]) is None
    assert file.function(at["first"]) is None
    label = file.function(at["handwritten"] + 2)
    assert label
    assert (label.name, label.size) == ("handwritten", 0)
    assert {getattr(file.thread_local(offset), "name", "") for offset in (0, 8, 16)} == {"own", "other", ""}
    for address in (0, 2**63, 2**64 - 1):
        assert file.function(address) is file.variable(address) is None
    file.close()


@pytest.mark.parametrize("name", ["$s3App4workyyF", "$x", "$d", "$x.12", "$d.realdata"])
def test_names_that_begin_as_the_mapping_symbols_of_arm64(program: Path, tmp_path: Path, name: str) -> None:
    """The first one is a function of Swift."""
    renamed = tmp_path / "renamed"
    subprocess.run(["objcopy", "--redefine-sym", f"handwritten={name}", program, renamed], check=True)
    file = opened(renamed)
    found = file.function(addresses(program)["handwritten"] + 2)
    assert (found.name if found else "") == (name if name.startswith("$s") else "")
    file.close()


def test_functions_of_a_stripped_file_are_told_by_the_unwinding_tables(program: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "stripped"
    subprocess.run(["strip", "-o", stripped, program], check=True)
    file, at = opened(stripped), addresses(program)
    assert file.function(at["plain"] + 4) is None
    assert file.function_start(at["plain"] + 4) == at["plain"]
    assert file.function_start(at["first"]) == -1
    rule = file.rule(at["plain"] + 4)
    assert rule
    assert rule.return_register == 16
    file.close()


def test_symbols_that_a_file_brings_along_compressed(program: Path, tmp_path: Path) -> None:
    symbols, packed, bringing = tmp_path / "symbols", tmp_path / "symbols.xz", tmp_path / "bringing"
    subprocess.run(["objcopy", "--only-keep-debug", program, symbols], check=True)
    packed.write_bytes(lzma.compress(symbols.read_bytes()))
    subprocess.run(
        ["objcopy", "-S", "--add-section", f".gnu_debugdata={packed}", program, bringing], check=True
    )
    file, at = opened(bringing), addresses(program)
    assert (found := file.function(at["main"]))
    assert found.name == "main"
    (listed,) = functions_by_name(file, lambda name: name in ("plain", "a_longer_alias"))
    assert (listed.names, listed.address) == (("plain", "a_longer_alias"), at["plain"])
    file.close()


def go_table(names: tuple[str, ...], at: int, magic: int = 0xFFFFFFF1) -> bytes:
    """Return a table as the Go linker writes it, for functions with these names, one after the other from
    address `at` on."""
    texts = b"".join(name.encode() + b"\0" for name in names)
    about = [struct.pack("<Ii", 16 * i, texts.index(name.encode())) for i, name in enumerate(names)]
    first = 8 * len(names) + 4
    functions = b"".join(struct.pack("<II", 16 * i, first + 8 * i) for i in range(len(names)))
    functions += struct.pack("<I", 16 * len(names)) + b"".join(about)
    header = struct.pack("<IHBBQQQ", magic, 0, 1, 8, len(names), 0, at)
    return header + struct.pack("<QQQQQ", 72, 0, 0, 0, 72 + len(texts)) + texts + functions


@pytest.mark.parametrize(("magic", "is_known"), [(0xFFFFFFF1, True), (0xFFFFFFF0, True), (0xFFFFFFFB, False)])
def test_functions_of_a_stripped_go_program(
    program: Path, tmp_path: Path, magic: int, is_known: bool
) -> None:
    table, go = tmp_path / "table", tmp_path / "go"
    at = addresses(program)["main"]
    table.write_bytes(go_table(("main.main", "main.(*Shop).Sell"), at, magic))
    subprocess.run(["objcopy", "-S", "--add-section", f".gopclntab={table}", program, go], check=True)
    file = opened(go)
    found = [file.function(at + offset) for offset in (-1, 0, 15, 16, 32)]  # the last address is in C code
    names = ["", "main.main", "main.main", "main.(*Shop).Sell", ""] if is_known else [""] * 5
    assert [symbol.name if symbol else "" for symbol in found] == names
    assert (file.function_start(at + 20) == at + 16) == is_known
    assert (file.is_go(at + 31), file.is_go(at + 32)) == (is_known, False)
    listed = functions_by_name(file, lambda name: name.endswith("Sell"))
    assert [(one.names, one.address) for one in listed] == [(("main.(*Shop).Sell",), at + 16)] * is_known
    file.close()


@pytest.mark.parametrize("told_by", ["symbol", "module", "linker", ""])
def test_where_the_code_of_a_go_program_begins(program: Path, tmp_path: Path, told_by: str) -> None:
    """Since Go 1.26 .gopclntab does not say where the code of Go begins.

    If the C linker made the program, .text begins with C code.
    """
    table, module, go = tmp_path / "table", tmp_path / "module", tmp_path / "go"
    at = addresses(program)["main"]
    table.write_bytes(go_table(("main.main",), 0))
    module.write_bytes(bytes(176) + struct.pack("<Q", at))
    options = {
        "symbol": ["--add-symbol", f"runtime.text={at}"],
        "module": ["--add-section", f".go.module={module}"],
        "linker": ["--rename-section", ".init=.a", "--rename-section", ".init_array=.b"],
        "": [],
    }
    added = ["-S", "--add-section", f".gopclntab={table}", *options[told_by]]
    subprocess.run(["objcopy", *added, program, go], check=True)
    file = opened(go)
    (listed,) = [function.address for function in file.tables[-1].functions()] or [0]
    text = next(section.address for section in Elf(go.read_bytes()).sections if section.name == ".text")
    assert listed == {"linker": text, "": 0}.get(told_by, at)
    file.close()


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"\x7fELF\x02\x01\x01" + bytes(9), b"text" * 100, b"!<arch>\n"]
)
def test_what_is_no_elf(data: bytes) -> None:
    with pytest.raises(ElfError):
        ObjectFile(Elf(data))


TABLES_ELSEWHERE = ("-fno-asynchronous-unwind-tables", "-fno-unwind-tables")
"""Options of gcc by which the unwinding rules are in `.debug_frame`, as in Go programs."""
BOMB = 64 << 20
STRUCT = "struct shop { long first, second; } shop; int unwound(int n) { return n + shop.first; }\n"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def with_bombs(directory: Path, *options: str) -> Path:
    """Compile a program whose debugging information takes 100 kB in the file, and 192 MiB unpacked."""
    source, plain, bombs = directory / "shop.c", directory / "plain", directory / "bombs"
    source.write_text(STRUCT + "int main(int n) { return unwound(n); }\n")
    subprocess.run(["gcc", "-O1", "-g", *options, "-o", plain, source], check=True)
    added = []
    for name in ("debug_pubnames", "debug_pubtypes", "debug_macinfo"):
        packed = directory / name
        packed.write_bytes(b"ZLIB" + struct.pack(">Q", BOMB) + zlib.compress(bytes(BOMB)))
        added += ["--add-section", f".z{name}={packed}"]
    subprocess.run(["objcopy", *added, plain, bombs], check=True)
    return bombs


@pytest.mark.parametrize("options", [(), TABLES_ELSEWHERE, (*TABLES_ELSEWHERE, "-gz=zlib")])
def test_rules_take_no_memory_for_what_is_no_rule(tmp_path: Path, options: tuple[str, ...]) -> None:
    """libdw would unpack all debugging information of the file, and keep it while the file is open."""
    bombs = with_bombs(tmp_path, *options)
    file, at, before = opened(bombs), addresses(bombs)["unwound"], resident_bytes()
    rule = file.rule(at + 1)
    assert rule
    assert rule.return_register == 16
    assert resident_bytes() - before < BOMB / 4
    file.close()


def test_members_of_structs_leave_nothing_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bombs = with_bombs(tmp_path)
    file, unit, before = opened(bombs), str(tmp_path / "shop.c"), resident_bytes()
    assert file.member_offset(unit, "shop", "second") == 8
    assert resident_bytes() - before < BOMB / 4
    monkeypatch.setattr(elfutils, "MAX_DWARF", 3 * BOMB)
    other = opened(bombs)
    assert other.member_offset(unit, "shop", "second") is None, "it would take more than that"
    for one in (file, other):
        one.close()


def test_of_a_file_that_was_closed_nothing_is_read(tmp_path: Path) -> None:
    """Somebody may still use a file that the cache has closed. By then, another file may have its number."""
    bombs = with_bombs(tmp_path)
    descriptor = os.open(bombs, os.O_RDONLY | os.O_CLOEXEC)
    elf = Elf(descriptor)
    assert elf.read(0, 4) == b"\x7fELF"
    elf.close()
    with bombs.open("rb") as other:
        os.dup2(other.fileno(), descriptor)
        assert elf.read(0, 4) == b""
        assert elf.member_offset(str(tmp_path / "shop.c"), "shop", "second") is None


def frames(count: int) -> bytes:
    """Return a `.debug_frame` with an entry for each 16 bytes of code from 0x500000 on."""
    common = struct.pack("<II10s6x", 20, 2**32 - 1, bytes((1, 0, 1, 0x78, 16, 0x0C, 7, 8, 0x90, 1)))
    return common + b"".join(struct.pack("<IIQQ", 20, 0, 0x500000 + 16 * i, 16) for i in range(count))


def test_rules_without_a_search_table_are_in_the_estimate(program: Path, tmp_path: Path) -> None:
    """libdw remembers all entries that it has passed on its way to the one it looks for."""
    count = elfutils.MAX_SCANNED // 24 - 1
    for entries in (count, count + 2):
        table, large = tmp_path / "table", tmp_path / "large"
        table.write_bytes(frames(entries))
        subprocess.run(["objcopy", "--add-section", f".debug_frame={table}", program, large], check=True)
        file, small, before = opened(large), opened(program), resident_bytes()
        estimate = file.memory - small.memory
        rule = file.rule(0x500000 + 16 * count - 1)
        assert (rule is not None) == (entries == count), "it is not read if it is larger than MAX_SCANNED"
        assert resident_bytes() - before < estimate + (1 << 20)
        assert estimate < 8 * elfutils.MAX_SCANNED
        file.close()
        small.close()


def long_rule() -> bytes:
    """Return a `.debug_frame` that says with 60 operations where each of 17 registers is, in one function."""
    operations = 60 * (b"\x0e" + b"\xff" * 8)
    size = bytes((len(operations) & 127 | 128, len(operations) >> 7))
    registers = b"".join(bytes((0x10, number)) + size + operations for number in range(17))
    common = struct.pack("<I8s", 2**32 - 1, bytes((1, 0, 1, 0x78, 16, 0x0C, 7, 8))) + registers
    common += bytes(-(4 + len(common)) % 8)
    return struct.pack("<I", len(common)) + common + struct.pack("<IIQQ", 20, 0, 0x500000, 0x1000)


def traced_bytes(looks: Callable[[], object]) -> int:
    """Return the bytes that a function leaves in memory."""
    tracemalloc.start()
    try:
        looks()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_long_rules_are_in_the_estimate_and_have_a_bound(program: Path, tmp_path: Path) -> None:
    table, large = tmp_path / "table", tmp_path / "large"
    table.write_bytes(long_rule())
    subprocess.run(["objcopy", "--add-section", f".debug_frame={table}", program, large], check=True)
    file = opened(large)
    assert (rule := file.rule(0x500FFF))
    assert [len(one or ()) for one in rule.registers.values()] == 17 * [61]
    before = file.memory
    taken = traced_bytes(lambda: [file.rule(0x500000 + at) and None for at in range(150)])
    assert taken / 1.2 < file.memory - before
    assert MAX_RULE_BYTES / 2 < file._rule_bytes <= MAX_RULE_BYTES
    file.close()


def test_long_names_are_in_the_estimate_and_have_a_bound(tmp_path: Path) -> None:
    """Each address in a function has a name of its own in memory."""
    source, library, name = tmp_path / "long.s", tmp_path / "long.so", "f" * 4000
    source.write_text(f".globl {name}\n.type {name}, @function\n{name}: .skip 4096\n.size {name}, .-{name}\n")
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, source], check=True)
    file, at = opened(library), addresses(library)[name]
    assert (function := file.function(at))
    assert function.name == name
    before = file.memory
    taken = traced_bytes(lambda: [file.function(at + offset) and None for offset in range(1, 900)])
    assert taken / 1.2 < file.memory - before
    assert MAX_FUNCTION_BYTES / 2 < file._function_bytes <= MAX_FUNCTION_BYTES
    file.close()


def test_the_tables_of_rules_are_in_the_estimate(program: Path) -> None:
    file = opened(program)
    (size,) = (section.size for section in file._elf.sections if section.name == ".eh_frame")
    assert file._elf.memory == size > 0
    file.close()


def test_headers_take_no_memory_without_end(program: Path) -> None:
    """libelf keeps some of what it reads, and a file that takes nearly no room on disk can be large."""
    content = bytearray(program.read_bytes())
    for at, size, most in ((54, 56, MAX_SEGMENTS), (58, 64, MAX_SECTIONS)):
        changed = content + bytes(size * (most + 1))
        struct.pack_into("<Q", changed, 32 if at == 54 else 40, len(content))
        struct.pack_into("<HH", changed, at, size, most + 1)
        with pytest.raises(ElfError, match=f"rule: at most {most}"):
            Elf(bytes(changed))
    assert Elf(bytes(content)).build_id
    (first, *_) = (section for section in Elf(bytes(content)).sections if section.kind == SHT_NOTE)
    (headers,) = struct.unpack_from("<Q", content, 40)
    number = 1 + Elf(bytes(content)).sections.index(first)
    struct.pack_into("<Q", content, headers + 64 * number + 32, elfutils.MAX_NOTE + 1)
    assert Elf(bytes(content) + bytes(elfutils.MAX_NOTE)).build_id == b""
