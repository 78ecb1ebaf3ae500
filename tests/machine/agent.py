"""The agent in a machine, which does what the test asks for by lines of JSON over a virtio port.

An answer is any number of lines with `more` (output of a program), then one line with `code` and `out`.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import urllib.request
from io import FileIO
from pathlib import Path
from typing import Any

NAME = "lockd-test"
PORTS = Path("/sys/class/virtio-ports")


class Port:
    """The virtio port to the host."""

    def __init__(self) -> None:
        (place,) = (port for port in PORTS.iterdir() if (port / "name").read_text().strip() == NAME)
        self._file = FileIO(f"/dev/{place.name}", "r+")

    def send(self, **answer: Any) -> None:
        line = json.dumps(answer).encode() + b"\n"
        while line:  # a raw write may be short
            line = line[self._file.write(line) :]

    def request(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            line += self._file.read(65536) or b""
        request: dict[str, Any] = json.loads(line)
        return request


def run(port: Port, argv: list[str], cwd: str, env: dict[str, str]) -> None:
    """Run a program in a session of its own, to its end."""
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=cwd or None,
        env={**os.environ, **env},
        start_new_session=True,
    ) as process:
        while text := output(process):
            port.send(more=text.decode(errors="replace"))
        code = process.wait()
    port.send(code=code, out="")


def output(process: subprocess.Popen[bytes]) -> bytes:
    """Return some of a program's output; nothing once it has ended.

    Another process that it left behind may still hold its output open.
    """
    assert process.stdout
    while not select.select([process.stdout], [], [], 0.5)[0]:
        if process.poll() is not None:
            return b""
    return os.read(process.stdout.fileno(), 1 << 16)


def put(port: Port, path: str, content: str, mode: int) -> None:
    Path(path).write_bytes(base64.b64decode(content))
    os.chmod(path, mode)
    port.send(code=0, out="")


def get(port: Port, url: str, seconds: float) -> None:
    with urllib.request.urlopen(url, timeout=seconds) as answer:
        port.send(code=0, out=answer.read().decode())


def main() -> None:
    port = Port()
    port.send(code=0, out="up")
    while True:
        request = port.request()
        try:
            {"run": run, "get": get, "put": put}[request.pop("do")](port, **request)
        except OSError as error:
            port.send(code=-1, out=f"{type(error).__name__}: {error}")


main()
