"""Starts the exporter process: `python3 -m lockd.export --control-fd N --listen-fd N`."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import math
import os
import signal
import socket
import sys
from pathlib import Path

from lockd import logs
from lockd.errors import LockdError
from lockd.export.handlers import Service
from lockd.export.link import SamplerLink
from lockd.export.server import Server
from lockd.export.web_config import WebConfig
from lockd.messages import SERVE
from lockd.process import confinement, memory, privileges

log = logging.getLogger(__name__)


def main() -> int:
    """Run the exporter until it is asked to end. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="lockd.export", description=__doc__)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--control-fd", type=int, help="descriptor of the socket to the sampler")
    task.add_argument(
        "--check", action="store_true", help="only read the file of --web-config, and print its errors"
    )
    parser.add_argument(
        "--listen-fd", type=int, default=[], action="append",
        help="descriptor of a listening socket; can be given more than once",
    )  # fmt: skip
    parser.add_argument(
        "--web-config", type=Path, help="the web configuration, in the format of the exporter-toolkit"
    )
    parser.add_argument(
        "--web-kept-fd", type=int,
        help="descriptor of the file with the protections that are in force since the start of lockd",
    )  # fmt: skip
    parser.add_argument(
        "--requests-share", type=float, default=math.inf,
        help="share of a processor for answers to one source (default: no limit)",
    )  # fmt: skip
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    args = parser.parse_args()
    logs.setup(args.log_level, process="exporter")
    memory.return_freed_memory()
    parent = os.getppid()
    try:
        if args.check:
            return _check(args.web_config)
        control = _socket("--control-fd", args.control_fd)
        listening = [_listening(fd) for fd in args.listen_fd]
        _drop_privileges(args.web_config)
        # SIGKILL ends even a stopped exporter, which would otherwise keep the port.
        privileges.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the request for its signal
            return 0
        # The filter of system calls is set before any input from clients is read.
        confinement.confine(confinement.EXPORTER, log_is_journal=logs.open_journal())
        # The unprivileged user reads the web configuration, and must be able to read it again later.
        stored = None if args.web_kept_fd is None else os.fdopen(args.web_kept_fd, "r+b", buffering=0)
        web = WebConfig(args.web_config, stored)
        if not control.recv(len(SERVE)):
            return 0  # the sampler failed to start
        asyncio.run(_serve(control, listening, web, args))
    except LockdError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


async def _serve(
    control: socket.socket, listening: list[socket.socket], web: WebConfig, args: argparse.Namespace
) -> None:
    """Answer requests until the sampler closes the control socket, or until SIGTERM or SIGINT."""
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    link = SamplerLink(control)
    service = Service(link, web, args.requests_share)
    link.reload = functools.partial(_reload, service)
    server = Server(service)
    for listener in listening:
        server.serve(listener)
    link.report_serving()
    waits = [asyncio.ensure_future(event.wait()) for event in (end, link.closed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    log.info("ending: %s", "the sampler has ended" if link.closed.is_set() else "received a signal")
    await server.finish()
    for wait in waits:
        wait.cancel()


def _reload(service: Service, level: str, share: float) -> bool:
    logs.set_level(level)
    service.work.set_share(share)
    return service.web.read_again("a reload was requested")


def _drop_privileges(web_config: Path | None) -> None:
    if web_config:  # imported as root: the unprivileged user may not be able to read lockd's files
        import lockd.export.web_config_file  # noqa: F401
    privileges.drop_all(privileges.unprivileged_user("lockd"))


def _check(web_config: Path) -> int:
    _drop_privileges(web_config)
    try:
        WebConfig(web_config)
    except LockdError as error:
        print(error)
        return error.exit_code
    return 0


def _socket(option: str, fd: int) -> socket.socket:
    try:
        inherited = socket.socket(fileno=fd)
    except OSError as error:
        raise LockdError(f"{option}: {fd}: {error.strerror}; rule: an open socket") from None
    inherited.set_inheritable(False)
    return inherited


def _listening(fd: int) -> socket.socket:
    listener = _socket("--listen-fd", fd)
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise LockdError(f"--listen-fd: {fd}: it does not listen; rule: a listening socket")
    return listener


if __name__ == "__main__":
    sys.exit(main())
