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
    """Until the end of the exporter; its exit code."""
    parser = argparse.ArgumentParser(prog="lockd.export", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--control-fd", type=int, help="socket to the sampler")
    what.add_argument("--check", action="store_true", help="only read --web-config, and say what is wrong")
    parser.add_argument(
        "--listen-fd", type=int, default=[], action="append", help="listening socket; repeatable"
    )
    parser.add_argument("--web-config", type=Path, help="the exporter-toolkit's file")
    parser.add_argument(
        "--web-kept-fd", type=int, help="file: what keeps people out since the start of lockd"
    )
    parser.add_argument(
        "--requests-share",
        type=float,
        default=math.inf,
        help="of a processor, for the answers to one source (default: no limit)",
    )
    parser.add_argument("--procfs", type=Path, default=Path("/proc"))
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
        privileges.die_with_parent(signal.SIGKILL)  # one that is stopped, too: it would keep the port
        if os.getppid() != parent:  # it ended before it could be noticed
            return 0
        confine()
        # As the user that serves: what it cannot read now, it could not read again later.
        kept = None if args.web_kept_fd is None else os.fdopen(args.web_kept_fd, "r+b", buffering=0)
        web = WebConfig(args.web_config, kept)
        if not control.recv(len(SERVE)):
            return 0  # the sampler could not start
        asyncio.run(_serve(control, listening, web, args))
    except LockdError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


async def _serve(
    control: socket.socket, listening: list[socket.socket], web: WebConfig, args: argparse.Namespace
) -> None:
    """Until the sampler closes the control socket, or SIGTERM."""
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    link = SamplerLink(control)
    service = Service(link, web, args.procfs, args.requests_share)
    link.reload = functools.partial(_reload, service)
    server = Server(service)
    for each in listening:
        server.serve(each)
    link.say_serving()
    waits = [asyncio.ensure_future(event.wait()) for event in (end, link.closed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    log.info("ending: %s", "the sampler is gone" if link.closed.is_set() else "asked to")
    await server.finish()
    for wait in waits:
        wait.cancel()


def _reload(service: Service, level: str, share: float) -> bool:
    logs.set_level(level)
    service.work.change(share)
    return service.web.read_again("a reload was asked for")


def _drop_privileges(web_config: Path | None) -> None:
    if web_config:  # while its own files can be read, wherever they are
        import lockd.export.web_config_file  # noqa: F401
    privileges.drop_all(privileges.unprivileged_user("lockd"))


def confine() -> None:
    """What it reads from here on, others may have written."""
    confinement.confine(confinement.EXPORTER, log_is_journal=logs.open_journal())


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
        given = socket.socket(fileno=fd)
    except OSError as error:
        raise LockdError(f"{option}: {fd}: {error.strerror}; rule: an open socket") from None
    given.set_inheritable(False)
    return given


def _listening(fd: int) -> socket.socket:
    given = _socket("--listen-fd", fd)
    if not given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise LockdError(f"--listen-fd: {fd}: it does not listen; rule: a listening socket")
    return given


if __name__ == "__main__":
    sys.exit(main())
