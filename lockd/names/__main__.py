"""The namer's process, started as `python3 -I lockd/process/isolation.py lockd.names FD`.

FD is the descriptor of a file with its settings.
"""

from __future__ import annotations

import sys

from lockd.names.server import main

if __name__ == "__main__":
    sys.exit(main())
