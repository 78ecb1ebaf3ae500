"""The one-shot tools by name; each is a module with HELP, add_options(parser) and run(args)."""

from __future__ import annotations

import argparse
from importlib import import_module

NAMES = ("stackcount",)


def add_to(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Add the commands to `lockd trace`. Of one in `argv`, only that module is imported."""
    commands = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    asked = [name for name in NAMES if name in argv[:1]] or NAMES
    for name in asked:
        module = import_module(f"lockd.trace.{name}")
        tool = commands.add_parser(
            name, help=module.HELP, description=f"{module.HELP}.", epilog=getattr(module, "EPILOG", None),
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_options(tool)
        tool.set_defaults(run=module.run)
