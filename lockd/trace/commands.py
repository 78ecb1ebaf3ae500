"""The subcommands of `lockd trace`, one for each one-shot tool."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Protocol

from lockd.errors import UsageError
from lockd.load.host import require_privileges
from lockd.trace.core import output
from lockd.trace.futex import futex, report
from lockd.trace.klock import klock
from lockd.trace.mutex import mutex
from lockd.trace.offcpu import offcpu, offwake
from lockd.trace.probes import hist, latency, signals, stackcount, stacksnoop


class Tool(Protocol):
    """The module of a tool.

    A module may also have an EPILOG, the end of its --help, and a function is_offline(args), which returns
    whether the tool reads a file and traces nothing.
    """

    HELP: str

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the tool. Returns the exit code."""


TOOLS: dict[str, Tool] = {
    "futex": futex,
    "klock": klock,
    "mutex": mutex,
    "offcpu": offcpu,
    "offwake": offwake,
    "report": report,
    "signals": signals,
    "stackcount": stackcount,
    "stacksnoop": stacksnoop,
    "hist": hist,
    "latency": latency,
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the tools to the parser of `lockd trace`."""
    parser.set_defaults(run=lambda args: _print_help(parser))
    commands = parser.add_subparsers(dest="tool", metavar="TOOL")
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
        tool.set_defaults(run=functools.partial(_run, module))


def _print_help(parser: argparse.ArgumentParser) -> int:
    """Print the help to standard error, as no tool was named."""
    print(parser.format_help(), end="", file=sys.stderr)
    return UsageError.exit_code


def _run(module: Tool, args: argparse.Namespace) -> int:
    """Check privileges and output options, then run a tool.

    Raises HostError if this user may not trace, and UsageError if an output file cannot be written or the
    output options contradict each other.
    """
    is_offline = getattr(module, "is_offline", None)
    if not (is_offline and is_offline(args)):
        require_privileges()
    output.check_options(args)
    return module.run(args)
