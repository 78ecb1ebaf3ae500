"""The loader process. Its argument is the number of a descriptor: the socket to which it sends its result.

Its settings come on standard input. Its exit codes are those of lockd's errors. Standard error has what it
logs, and then the message of the error that ended it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from lockd.errors import LockdError
from lockd.load.child import send_result
from lockd.load.loader import load
from lockd.load.settings import LoadSettings
from lockd.process import privileges


def main() -> int:
    parent = os.getppid()
    privileges.die_with_parent(signal.SIGKILL)  # without the parent nobody would receive the attachments
    if os.getppid() != parent:
        return 1
    logging.basicConfig(level=logging.INFO, format="%(levelname)s:%(message)s")
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        loaded = load(LoadSettings.from_json(sys.stdin.buffer.read()))
        send_result(sock, loaded.manifest, loaded.fds)
    except LockdError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (OSError, MemoryError) as error:  # mostly for lack of memory or another resource
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return LockdError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
