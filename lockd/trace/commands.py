"""The one-shot tools by name."""

from __future__ import annotations

import argparse
from typing import Protocol

from lockd.trace import stackcount


class Tool(Protocol):
    """What a module of a tool has; it may have an EPILOG for its --help as well."""

    HELP: str

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """The exit code."""


TOOLS: dict[str, Tool] = {
    "stackcount": stackcount,
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the tools to `lockd trace`."""
    commands = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    for name, module in TOOLS.items():
        tool = commands.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP}.",
            epilog=getattr(module, "EPILOG", None),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_options(tool)
        tool.set_defaults(run=module.run)
