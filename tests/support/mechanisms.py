"""Daemons that run beside each other, one for each mechanism, so that they see the same events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.lockd_process import Lockd, Metrics, lockd_or_reason


def asked_for(request: pytest.FixtureRequest, parameter: str) -> set[str]:
    """Return the values of a parameter for which the requesting module has tests in this run."""
    items = [item for item in request.session.items if item.path == request.path]
    given: list[dict[str, str]] = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return {params[parameter] for params in given if parameter in params}


class Daemons:
    """A daemon for each of `mechanisms` that this kernel offers, and `others`, which run already."""

    def __init__(
        self,
        directory: Path,
        mechanisms: Collection[str],
        config: Callable[[str], dict[str, Any]],
        others: Mapping[str, Lockd] | None = None,
    ) -> None:
        def start(mechanism: str) -> Lockd | str:
            (directory / mechanism).mkdir()
            return lockd_or_reason(directory / mechanism, config(mechanism))

        others = others or {}
        with ThreadPoolExecutor(len(mechanisms) or 1) as pool:
            self._own = dict(zip(mechanisms, pool.map(start, mechanisms), strict=True))
        self._started: dict[str, Lockd | str] = {**others, **self._own}
        self.running = {by: one for by, one in self._started.items() if isinstance(one, Lockd)}

    def __getitem__(self, mechanism: str) -> Lockd:
        """Return the daemon of a mechanism. Skips the test where this kernel does not offer it."""
        daemon = self._started[mechanism]
        if isinstance(daemon, str):
            pytest.skip(f"host: {daemon}")
        return daemon

    def metrics(self) -> dict[str, Metrics]:
        """Return the metrics of each daemon, with everything that happened before the call."""
        with ThreadPoolExecutor(len(self.running)) as pool:
            return dict(zip(self.running, pool.map(Lockd.metrics, self.running.values()), strict=True))

    def stop(self) -> None:
        codes = {by: daemon.stop() for by, daemon in self._own.items() if isinstance(daemon, Lockd)}
        assert not any(codes.values()), codes
