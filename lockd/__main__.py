"""Runs the command line of lockd: `python3 -m lockd` is the same as `lockd`."""

import sys

from lockd.cli import main

sys.exit(main())
