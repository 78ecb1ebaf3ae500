"""Run a command as root in a machine that runs the given kernel, in the checkout as it is now (/work there).

Usage: tests/vm/run KERNEL COMMAND [ARGUMENT...]   e.g. tests/vm/run 6.12 /usr/bin/python3 -m lockd doctor

Prints what the command prints, as it comes, and ends with its exit code. VM_SECONDS (3600) is how long it may
take. With VM_COMPILED=1, the BPF programs that tests need are compiled outside before; inside, clang takes
minutes.
"""

from __future__ import annotations

import os
import sys
import time

from tests.machine.base import base
from tests.vm import compiled, guests, kernels


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        kernel = kernels.kernel_of(sys.argv[1])
    except ValueError as error:
        print(f"tests/vm/run: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    seconds = float(os.environ.get("VM_SECONDS", "3600"))
    with guests.checkout() as disk, guests.booted(kernel, disk) as machine:
        if os.environ.get("VM_COMPILED"):
            print(f"[{compiled.give(machine, base() / 'root')} programs given]", file=sys.stderr)
        print(f"[{kernel.series} up in {time.monotonic() - began:.0f} s]", file=sys.stderr)
        code = machine.run(*sys.argv[2:], seconds=seconds, cwd=guests.WORK, more=say).code
        print(f"[exit code {code} after {time.monotonic() - began:.0f} s]", file=sys.stderr)
    return code if code >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
