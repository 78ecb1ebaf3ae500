"""The loader process: settings on standard input, result on the socket named in its arguments.

Exit codes are lockd's own; what went wrong is on standard error, after what is to be logged.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from lockd.errors import LockdError
from lockd.load import handover
from lockd.load.loader import load
from lockd.load.settings import LoadSettings
from lockd.process import privileges


def main() -> int:
    parent = os.getppid()
    privileges.die_with_parent(signal.SIGKILL)  # nobody else would have what it attaches
    if os.getppid() != parent:
        return 1
    logging.basicConfig(level=logging.INFO, format="%(levelname)s:%(message)s")
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        loaded = load(LoadSettings.from_json(sys.stdin.buffer.read()))
        handover.send(sock, loaded.manifest, loaded.fds)
    except LockdError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (OSError, MemoryError) as error:  # too little of something, mostly
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return LockdError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
