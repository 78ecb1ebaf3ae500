"""`python3 -m lockd` does what the `lockd` command does."""

import sys

from lockd.cli import main

sys.exit(main())
