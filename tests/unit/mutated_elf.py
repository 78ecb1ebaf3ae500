"""Reads ELF files of which a few bytes are changed, in every way that names of locks are made from them.

For a process of its own: `mutated_elf.py FILE SEED COUNT` prints how many were read. A file that makes it
loop, die or raise anything but ElfError ends it without that.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import tempfile

from lockd.names.elf import ObjectFile
from lockd.names.libdw import Elf, ElfError
from lockd.names.memory_image import memory_image

MEMORY = 512 << 20
SPREAD = 40


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Half of the changes are near the beginning or the end, where the headers are."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 3, 10, 100))):
        near = chance.choice((64, 1024, len(data), len(data)))
        at = chance.randrange(near) if chance.random() < 0.8 else len(data) - 1 - chance.randrange(near)
        changed[at % len(changed)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    if chance.random() < 0.2:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)


def use(elf: Elf, chance: random.Random) -> None:
    file = ObjectFile(elf)
    end = max(file.end, 1)
    for _ in range(SPREAD):
        address = chance.randrange(min(end, 2**63)) if chance.random() < 0.9 else chance.randrange(2**64)
        file.function(address)
        file.variable(address)
        file.thread_local(address)
        file.function_start(address)
        file.rule(address)
        file.code(address, 16)
    assert file.memory >= 0
    file.close()


def main(path: str, seed: str, count: str) -> None:
    with open(path, "rb") as file:
        data = file.read()
    # Before the work, so that what a run takes is the file's doing.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    read = 0
    for number in range(int(count)):
        chance = random.Random(f"{seed}/{number}")
        one = mutated(data, chance)
        print(number, end=" ", file=sys.stderr, flush=True)
        try:
            if chance.random() < 0.5:
                use(Elf(one), chance)
            else:
                with tempfile.TemporaryFile() as copy:
                    copy.write(one)
                    copy.flush()
                    elf = Elf(os.dup(copy.fileno()))
                    use(elf, chance)
            use(Elf(memory_image(lambda at, size: one[at : at + size] if at >= 0 else b"", 0)), chance)  # noqa: B023
            read += 1
        except (ElfError, MemoryError):
            pass
    print(read)


if __name__ == "__main__":
    main(*sys.argv[1:])
