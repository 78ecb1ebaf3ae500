"""Harnesses for programs and libraries that anybody may have built: ELF, DWARF, and Go's own tables."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import struct
import subprocess
import sysconfig
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockd.names.objects.elfutils import Elf, ElfError, Section
from lockd.names.objects.memory_image import memory_image
from lockd.names.objects.object_file import ObjectFile, functions_by_name, tail_callers
from lockd.names.objects.symbols import GO_HEADER, GO_MAGICS, GoFunctions
from lockd.names.unwind.expressions import UnknownValue, evaluate
from tests.fuzz.harness import Harness, file_of, mutated

SOURCE = """
struct shop { int size; long lock; };
static struct shop shop;
__thread long own;
int put(struct shop *s) { return s->size; }
int _put(struct shop *s) __attribute__((alias("put")));
static long take(struct shop *s) { return put(s) + own; }
int main(int argc, char **argv) { shop.size = argc; return (int)take(&shop); }
"""
UNIT, STRUCTURE, MEMBER = "shop.c", "shop", "lock"
LONGEST = 1 << 16
SECTION = struct.Struct("<IIQQQQIIQQ")
TRIED = 24
"""The number of addresses that are looked up in a file."""


def use(file: ObjectFile, chance: random.Random) -> None:
    """Read from a file everything from which lockd makes names."""
    known = [entry.address for entry in functions_by_name(file, lambda name: True)[: TRIED // 2]]
    tail_callers(file, lambda name: True)
    end = max(file.end, 1)
    random_ones = [chance.randrange(min(end, 2**63)) for _ in range(TRIED // 2)]
    for address in (*known, *random_ones, 0, 2**63, 2**64 - 1):
        for place in (address, (address + 4) % 2**64):
            file.function(place)
            file.variable(place)
            file.thread_local(place)
            file.function_start(place)
            file.code(place, 16)
            file.file_offset(place)
            rule = file.rule(place)
            for expression in (rule.cfa, *rule.registers.values()) if rule else ():
                _evaluate(expression or ())
    file.variable_address("_PyRuntime")
    file.variable_address("shop")
    file.member_offset(UNIT, STRUCTURE, MEMBER)
    assert file.memory >= 0 and file.thread_local_block is not file
    file.close()


def _evaluate(expression: Sequence[tuple[int, int, int]]) -> None:
    try:
        found = evaluate(expression, dict.fromkeys(range(17), 0x7F00), 0x7F00, lambda address: address & 0xFF)
    except UnknownValue:
        return
    assert found >= 0


def read_elf(data: bytes) -> None:
    """A file that can be read in part has names in part; any other one is an ElfError. This holds for its
    bytes, for its descriptor, and for the memory to which it is mapped."""
    chance = random.Random(zlib.crc32(data))
    with contextlib.suppress(ElfError):
        use(ObjectFile(Elf(data)), chance)
    with contextlib.suppress(ElfError):
        use(ObjectFile(Elf(os.open(file_of(data), os.O_RDONLY | os.O_CLOEXEC))), chance)
    with contextlib.suppress(ElfError):
        image = memory_image(lambda at, size: data[at : at + size] if at >= 0 else b"", 0)
        use(ObjectFile(Elf(image)), chance)


@functools.cache
def programs() -> list[bytes]:
    """Return small programs that differ in how their tables of symbols and for unwinding are stored, and
    extensions of Python, which are all that there is without a compiler."""
    found = []
    if shutil.which("gcc") and shutil.which("objcopy"):
        with tempfile.TemporaryDirectory(prefix="lockd-fuzz-") as name:
            directory = Path(name)
            (directory / "shop.c").write_text(SOURCE)
            for number, flags in enumerate(
                (("-g",), ("-g", "-gz", "-O2", "-s"), ("-g", "-fno-asynchronous-unwind-tables", "-gdwarf-4"),
                 ("-g", "-shared", "-fPIC"), ("-g", "-static", "-nostdlib", "-Wl,-e,main", "-fno-PIE"))
            ):  # fmt: skip
                program = directory / str(number)
                done = subprocess.run(["gcc", *flags, "-o", program, "shop.c"], cwd=directory, check=False)
                found += [program.read_bytes()] * (done.returncode == 0)
            symbols, packed, small = directory / "symbols", directory / "symbols.xz", directory / "small"
            subprocess.run(["objcopy", "--only-keep-debug", directory / "0", symbols], check=True)
            import lzma

            packed.write_bytes(lzma.compress(symbols.read_bytes()))
            subprocess.run(
                ["objcopy", "-S", "--add-section", f".gnu_debugdata={packed}", directory / "0", small],
                check=True,
            )
            found += [small.read_bytes(), symbols.read_bytes()]
    extensions = sorted(
        Path(sysconfig.get_path("platstdlib")).glob("lib-dynload/*.so"), key=lambda path: path.stat().st_size
    )
    return [one for one in (*found, *(path.read_bytes() for path in extensions[:2])) if len(one) <= LONGEST]


def sections(data: bytes) -> list[tuple[str, int, int]]:
    """Return the name, offset and size of each section that a 64-bit ELF file has."""
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        return []
    at, count, names = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<2H", data, 60)
    headers = [
        SECTION.unpack_from(data, place)
        for place in range(at, at + SECTION.size * min(count, 64), SECTION.size)
        if place + SECTION.size <= len(data)
    ]
    texts = headers[names][4] if names < len(headers) else 0
    told = [
        data[texts + header[0] : texts + header[0] + 40].partition(b"\0")[0].decode("latin-1")
        for header in headers
    ]
    return [(name, header[4], header[5]) for name, header in zip(told, headers, strict=True)]


def _mutate_within(data: bytes, chance: random.Random, start: int, size: int) -> bytes:
    end = min(start + max(size, 1), len(data))
    if not 0 <= start < end:
        return mutated(data, chance, keeps_length=True)
    near = start + chance.randrange(end - start) if chance.random() < 0.7 else start
    end = min(end, near + chance.choice((8, 64, 4096)))
    return data[:near] + mutated(data[near:end], chance, keeps_length=True)[: end - near] + data[end:]


def mutate_elf(data: bytes, chance: random.Random) -> bytes:
    """Change an ELF file in its headers or in one of its sections."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        found = sections(data)
        match chance.randrange(5 if found else 2):
            case 0:
                data = _mutate_within(data, chance, 16, 48)
            case 1:
                data = _mutate_within(data, chance, 64, 13 * 56)
            case 2:
                data = _mutate_within(
                    data, chance, struct.unpack_from("<Q", data, 40)[0], SECTION.size * len(found)
                )
            case _:
                _, at, size = chance.choice(found)
                data = _mutate_within(data, chance, at, size)
    return data[: chance.randrange(len(data))] if chance.random() < 0.05 else data


def read_dwarf(data: bytes) -> None:
    """Read rules for unwinding and members of structures from a file whose headers are right."""
    chance = random.Random(zlib.crc32(data))
    try:
        elf = Elf(data)
    except ElfError:
        return
    text = next((one for one in elf.sections if one.name == ".text"), None)
    at, size = (text.address, max(text.size, 1)) if text else (0x1000, 0x1000)
    for address in (at, *(at + chance.randrange(size) for _ in range(TRIED)), 2**64 - 1):
        rule = elf.rule(address, 17)
        for expression in (rule.cfa, *rule.registers.values()) if rule else ():
            _evaluate(expression or ())
    elf.member_offset(UNIT, STRUCTURE, MEMBER)
    assert len(elf.build_id) <= 64 and isinstance(elf.debug_link[0], bytes)
    elf.close()


def mutate_dwarf(data: bytes, chance: random.Random) -> bytes:
    found = [one for one in sections(data) if one[0].startswith((".debug_", ".eh_frame", ".zdebug", ".note"))]
    for _ in range(chance.choice((1, 1, 2, 4))):
        if found:
            _, at, size = chance.choice(found)
            data = _mutate_within(data, chance, at, size)
    return data


class _GoElf:
    """The parts of an ELF file that the reader of Go's table needs: the table and the program text."""

    is_64 = is_little = True

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.sections = (
            Section(".gopclntab", 1, 2, 0, 0, len(data), 0),
            Section(".text", 1, 6, 0x401000, 0, 4096, 0),
        )

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size] if offset >= 0 and size > 0 else b""


def read_go(data: bytes) -> None:
    """Look up the functions of a Go program in a table of any size and content."""
    elf: Any = _GoElf(data)
    table = GoFunctions(elf)
    for address in (0x401000, 0x401010, 0x40101F, 0x401FFF, 0, 2**64 - 1):
        found = table.function(address)
        assert found is None or (found.name and found.size >= 0)
    for number, _ in enumerate(table.functions()):
        assert number <= len(data)
    assert table.memory <= len(data)


def go_tables() -> list[bytes]:
    """Return tables of functions as Go's linker writes them."""
    names = ("main.main", "main.(*Shop).Sell", "sync.(*Mutex).Lock")
    texts = b"".join(name.encode() + b"\0" for name in names)
    about = [struct.pack("<Ii", 16 * i, texts.index(name.encode())) for i, name in enumerate(names)]
    first = 8 * len(names) + 4
    functions = b"".join(struct.pack("<II", 16 * i, first + 8 * i) for i in range(len(names)))
    functions += struct.pack("<I", 16 * len(names)) + b"".join(about)
    return [
        GO_HEADER.pack(
            magic, 0, 1, 8, len(names), 0, 0x401000, GO_HEADER.size, 0, 0, 0, GO_HEADER.size + len(texts)
        )
        + texts
        + functions
        for magic in GO_MAGICS
    ]


def expressions(data: bytes) -> None:
    """Evaluate any operations, in the form in which libdw gives them."""
    whole = len(data) // 17 * 17
    _evaluate(list(struct.iter_unpack("<BQQ", data[:whole]))[:64])


def known_expressions() -> list[bytes]:
    operations = (
        (0x77, 8, 0),
        (0x06, 0, 0),
        (0x23, 16, 0),
        (0x9F, 0, 0),
        (0x35, 0, 0),
        (0x24, 0, 0),
        (0x1E, 0, 0),
    )
    return [b"".join(struct.pack("<BQQ", *one) for one in operations), struct.pack("<BQQ", 0x77, 8, 0)]


HARNESSES = (
    Harness("elf", read_elf, programs, mutate_elf, longest=LONGEST, seconds=5.0),
    Harness("dwarf", read_dwarf, programs, mutate_dwarf, longest=LONGEST, seconds=2.0),
    Harness("go", read_go, go_tables, mutated),
    Harness("expressions", expressions, known_expressions, mutated, longest=2048),
)
