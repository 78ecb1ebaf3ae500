"""The command line: reads flags and the configuration, then runs the command."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

from lockd import __version__
from lockd.errors import LockdError, UsageError
from lockd.printable import printable

if TYPE_CHECKING:
    from lockd.config.schema import Config

INTERRUPTED = 130
"""The exit code after Ctrl-C, which is what a shell reports for a program that SIGINT ended."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, with a hint at the --help of the command.

    Arguments may stand among options, as in `stackcount t:sched:sched_switch -p 1 10`.
    """

    _is_inside = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self._is_inside or self._subparsers:
            return super().parse_known_args(args, namespace)
        self._is_inside = True  # parse_known_intermixed_args() calls this method
        try:
            parsed, rest = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inside = False
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nsee: {self.prog} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # a failed write raises here; when Python exits, it could only print the error
        super().exit(status, message)


class _Output(io.FileIO):
    """Standard output. A failed write raises LockdError, so that no other file seems to have failed.

    If the reader of a pipe has ended, BrokenPipeError is raised instead.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LockdError(f"standard output: cannot be written: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code.

    It is 0 if the command succeeded, 1 if it failed, 2 for wrong usage or an invalid configuration, 3 if this
    host cannot do it, and INTERRUPTED after Ctrl-C.
    """
    _set_up_streams()
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        code = _command(_parser(words).parse_args(words))
        sys.stdout.flush()
        return code
    except LockdError as error:
        # A message may have names that other users chose, such as those of files that a process has mapped.
        for line in str(error).split("\n"):
            print(f"lockd: error: {printable(line)}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except (LockdError, OSError):  # the error may have been about standard output
            _drop_output()
        return error.exit_code
    except KeyboardInterrupt:
        _drop_output()
        return INTERRUPTED
    except BrokenPipeError:  # as in `lockd check | head`
        _drop_output()
        return LockdError.exit_code


def _set_up_streams() -> None:
    """Open /dev/null in place of standard streams that are closed, and make standard output an _Output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else the next file would get the closed stream's descriptor number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 -- it stays open
    text = sys.stdout
    if text is sys.__stdout__ and isinstance(text, io.TextIOWrapper):
        raw = _Output(text.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            cast("BinaryIO", raw) if text.write_through else io.BufferedWriter(raw),
            text.encoding, text.errors, line_buffering=text.line_buffering, write_through=text.write_through,
        )  # fmt: skip


def _drop_output() -> None:
    """Drop output that is still buffered. Python would write this output at its exit, and fail again or wait
    for a reader."""
    with contextlib.suppress(io.UnsupportedOperation):  # standard output has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(args: argparse.Namespace) -> int:
    # Imports are late, so that each command starts quickly and needs only the libraries that it uses.
    if args.command == "top":
        from lockd.views import top

        return top.run(top.options(args))
    if args.command in ("trace", "analyze"):
        return int(args.run(args))

    config = None if args.command == "doctor" else _config(args)
    from lockd.service import start

    if config is None:
        return start.doctor()
    if args.command == "check":
        return start.check(config, args.quiet)
    return start.run(config, lambda: _config(args), args.strict)


def _config(args: argparse.Namespace) -> Config:
    """The configuration: the values of the file, or of flags where they are given.

    Raises ConfigError or UsageError.
    """
    from lockd.config.schema import Log, Web, load

    config = load(args.config_file)
    listen = tuple(args.listen or config.web.listen)
    if len(set(listen)) < len(listen):
        raise UsageError("argument --web.listen-address: the same address is given twice")
    web = Web(listen=listen, config_file=args.web_config or config.web.config_file)
    log = Log(level=args.level or config.log.level)
    return dataclasses.replace(config, web=web, log=log)


def _parser(words: list[str]) -> Parser:
    parser = Parser(
        prog="lockd",
        description="Measures where threads wait for locks, for how long, and who makes them wait.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, does: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=does, description=f"{does}.", allow_abbrev=False)

    run = command("run", "Run the daemon: measure, and serve the metrics")
    _daemon_flags(run)
    run.add_argument("--strict", action="store_true", help="fail if this kernel lacks a hook")
    check = command("check", "Check the file of --config.file, or the defaults; print what would be measured")
    _daemon_flags(check)
    check.add_argument("--quiet", action="store_true", help="print only what is wrong with the configuration")
    command("doctor", "Print which hooks this host has, and why it lacks the others")
    _top_flags(command("top", "Show live which threads are blocked most, and on which locks"))
    trace = command("trace", "Trace for a while and print a report: one-shot tools")
    if words[:1] == ["trace"]:
        from lockd.trace import commands as tools

        tools.add_to(trace)
        trace.set_defaults(command_line=shlex.join(["lockd", *words]))
    analyze = command("analyze", "Print or draw a report of recorded lock waits")
    if words[:1] == ["analyze"]:
        from lockd.analyze import command as analysis

        analysis.add_options(analyze)
    return parser


def _version() -> str:
    return f"lockd {__version__}, Python {platform.python_version()}"


def _daemon_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of run and check, named as those of Prometheus exporters. They override the configuration
    file."""
    parser.add_argument(
        "--config.file",
        dest="config_file",
        metavar="FILE",
        type=Path,
        help="the configuration file (YAML); without it all keys have their defaults",
    )
    parser.add_argument(
        "--web.listen-address",
        dest="listen",
        metavar="HOST:PORT",
        action="append",
        type=_address,
        help="address to listen on; can be given more than once (default: 127.0.0.1:9776)",
    )
    parser.add_argument(
        "--web.config.file",
        dest="web_config",
        metavar="FILE",
        type=Path,
        help="file with TLS and passwords, in the format of the exporter-toolkit",
    )
    parser.add_argument(
        "--log.level",
        dest="level",
        choices=("debug", "info", "warning", "error"),
        help="severity of the least important messages that are logged (default: info)",
    )


def _top_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:9776",
        help="URL of the daemon; can contain a user name and password (default: %(default)s)",
    )
    parser.add_argument(
        "--interval",
        metavar="DURATION",
        type=_interval,
        default="1s",
        help="time from one update to the next, from 100ms to 1h (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print one report after one interval, and exit")
    parser.add_argument(
        "--sort",
        choices=("blocked", "max", "waiting", "held"),
        default="blocked",
        help="order of rows: by blocked time in the interval (blocked), longest wait since the daemon has "
        "the row (max), waiting threads (waiting), or time that kernel locks are held (held; needs mode "
        "all); default: %(default)s",
    )
    parser.add_argument(
        "--by",
        choices=("lock", "holder", "bottleneck"),
        default="lock",
        help="what the first table shows: locks (lock); the code that held locks, by the time for which "
        "it made threads wait (holder); or the code that makes them wait in the end, where holders wait for "
        "other locks themselves (bottleneck); default: %(default)s",
    )
    parser.add_argument(
        "--kind",
        metavar="KINDS",
        default="lock,pi",
        help="kinds of futex waits: lock, pi, cond, other, separated by commas; `all` shows these and "
        "off-CPU time (default: %(default)s, and kernel locks)",
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=_limit,
        help="largest number of rows of each table (default: as many as there is room for; 20 with --once or "
        "without a terminal)",
    )
    parser.add_argument("--insecure", action="store_true", help="accept any TLS certificate without checks")


def _address(text: str) -> tuple[str, int]:
    from lockd.config.rules import ADDRESS_WANTS, parse_address

    try:
        return parse_address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {ADDRESS_WANTS}") from None


def _interval(text: str) -> int:
    from lockd.config.rules import parse_duration, within

    try:
        return within(parse_duration(text), parse_duration("100ms"), parse_duration("1h"))
    except ValueError:
        wants = "a duration from 100ms to 1h, such as 1s"
        raise argparse.ArgumentTypeError(f"{text!r} is not {wants}") from None


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 10000")
    return int(text)
