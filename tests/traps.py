"""Modules that must never be imported, with names that lockd imports, in a directory and in its .local."""

from __future__ import annotations

import sys
from pathlib import Path

NAMES = (
    "argparse", "asyncio", "bcc", "ctypes", "json", "lockd", "logging", "numpy", "prometheus_client", "runpy",
    "site", "sitecustomize", "socket", "tornado", "usercustomize", "yaml",
)  # fmt: skip


class Traps:
    """The trap modules. Each writes its name to a file when it is imported, and ends the program."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._sprung = directory / "sprung"
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        packages = directory / ".local/lib" / version / "site-packages"
        packages.mkdir(parents=True)
        text = (
            f"import sys\nopen({str(self._sprung)!r}, 'a').write(__name__ + chr(10))\nsys.exit('trapped')\n"
        )
        for name in NAMES:
            for place in (directory, packages):
                (place / f"{name}.py").write_text(text)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a person whose home is the directory, and who has it in PYTHONPATH."""
        return {"HOME": str(self.directory), "PYTHONPATH": str(self.directory)}

    @property
    def sprung(self) -> set[str]:
        """Names of the modules that were imported."""
        return set(self._sprung.read_text().split()) if self._sprung.exists() else set()
