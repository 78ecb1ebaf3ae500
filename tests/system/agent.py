"""Runs in the guest: does what the test asks for, by lines of JSON over a virtio port."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from typing import Any

PORT = "/dev/virtio-ports/lockd-test"


def run(argv: list[str], seconds: float) -> dict[str, Any]:
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds,
        check=False,
    )
    return {"code": done.returncode, "out": done.stdout.decode(errors="replace")}


def get(url: str, seconds: float) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=seconds) as answer:
        return {"code": 0, "out": answer.read().decode()}


def main() -> None:
    with open(PORT, "r+b", buffering=0) as port:
        port.write(b'{"code": 0, "out": "up"}\n')
        while True:
            line = b""
            while not line.endswith(b"\n"):
                line += port.read(65536) or b""
            request = json.loads(line)
            try:
                answer = {"run": run, "get": get}[request["do"]](request["what"], request["seconds"])
            except (OSError, subprocess.TimeoutExpired) as error:
                answer = {"code": -1, "out": f"{type(error).__name__}: {error}"}
            answer_line = json.dumps(answer).encode() + b"\n"
            while answer_line:  # a raw write may be short
                answer_line = answer_line[port.write(answer_line) :]


main()
