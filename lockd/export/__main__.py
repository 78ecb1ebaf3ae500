"""Starts the exporter process: `python3 -m lockd.export --control-fd N --listen-fd N`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import pwd
import signal
import socket
import sys
from pathlib import Path

from lockd import heap, logs, privileges
from lockd.errors import LockdError
from lockd.export.handlers import Service
from lockd.export.sampler_link import SamplerLink
from lockd.export.server import Server
from lockd.export.web_config import WebConfig
from lockd.snapshot import SERVE

log = logging.getLogger(__name__)


def main() -> int:
    """Until the end of the exporter; its exit code."""
    parser = argparse.ArgumentParser(prog="lockd.export", description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True, help="socket to the sampler")
    parser.add_argument(
        "--listen-fd", type=int, required=True, action="append", help="listening socket; repeatable"
    )
    parser.add_argument("--web-config", type=Path, help="the exporter-toolkit's file")
    parser.add_argument("--procfs", type=Path, default=Path("/proc"))
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    args = parser.parse_args()
    logs.setup(args.log_level, process="exporter")
    heap.keep_little()
    parent = os.getppid()
    try:
        control = _socket("--control-fd", args.control_fd)
        listening = [_listening(fd) for fd in args.listen_fd]
        if args.web_config:  # while its own files can be read, wherever they are
            import lockd.export.web_config_file  # noqa: F401
        privileges.drop_all(_unprivileged_user() if os.geteuid() == 0 else None)
        privileges.die_with_parent(signal.SIGKILL)  # one that is stopped, too: it would keep the port
        if os.getppid() != parent:  # it ended before it could be noticed
            return 0
        # As the user that serves: what it cannot read now, it could not read again later.
        web = WebConfig(args.web_config)
        if not control.recv(len(SERVE)):
            return 0  # the sampler could not start
        asyncio.run(_serve(control, listening, web, args.procfs))
    except LockdError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


async def _serve(
    control: socket.socket, listening: list[socket.socket], web: WebConfig, procfs: Path
) -> None:
    """Until the sampler closes the control socket, or SIGTERM."""
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    link = SamplerLink(control)
    server = Server(Service(link, web, procfs))
    for each in listening:
        server.serve(each)
    link.say_serving()
    waits = [asyncio.ensure_future(event.wait()) for event in (end, link.closed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    log.info("ending: %s", "the sampler is gone" if link.closed.is_set() else "asked to")
    await server.finish()
    for wait in waits:
        wait.cancel()


def _unprivileged_user() -> str:
    try:
        return pwd.getpwnam("lockd").pw_name
    except KeyError:
        return "nobody"


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
