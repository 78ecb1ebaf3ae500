"""Daemons for all mechanisms beside each other, so that they see the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.lockd_process import Lockd, Metrics, lockd_or_reason


class Daemons:
    """A daemon for each of these mechanisms that this kernel offers."""

    def __init__(
        self, directory: Path, mechanisms: tuple[str, ...], config: Callable[[str], dict[str, Any]]
    ) -> None:
        def start(mechanism: str) -> Lockd | str:
            (directory / mechanism).mkdir()
            return lockd_or_reason(directory / mechanism, config(mechanism))

        with ThreadPoolExecutor(len(mechanisms)) as pool:
            self._started = dict(zip(mechanisms, pool.map(start, mechanisms), strict=True))
        self.running = {by: one for by, one in self._started.items() if isinstance(one, Lockd)}

    def __getitem__(self, mechanism: str) -> Lockd:
        """Skips where this kernel does not offer that mechanism."""
        daemon = self._started[mechanism]
        if isinstance(daemon, str):
            pytest.skip(f"host: {daemon}")
        return daemon

    def metrics(self) -> dict[str, Metrics]:
        """Of each, with everything that happened before the call."""
        with ThreadPoolExecutor(len(self.running)) as pool:
            return dict(zip(self.running, pool.map(Lockd.metrics, self.running.values()), strict=True))

    def stop(self) -> None:
        codes = {by: daemon.stop() for by, daemon in self.running.items()}
        assert not any(codes.values()), codes
