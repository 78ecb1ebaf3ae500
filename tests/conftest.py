"""What holds for all tiers: which tests belong to one, and when a test may be skipped."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TIERS = {"kernel", "system", "vm"}
HERE = Path(__file__).parent

# Exactly, and however slow the machine is at the moment.
settings.register_profile("lockd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockd")


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Started in the background of a script. The programs under test would inherit it, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips-allowed",
        action="store_true",
        default=os.environ.get("CI", "") not in ("", "0", "false"),
        help="a skip fails unless its reason starts with `host:`, that is unless this host cannot do it;"
        " on by itself where CI is set",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of a tier has its marker, for `pytest -m 'not system'`."""
    for item in items:
        if HERE in item.path.parents and (tier := item.path.relative_to(HERE).parts[0]) in TIERS:
            item.add_marker(tier)


# Wrappers of the old kind, which pytest 7 of Debian 12 knows too: the tier vm runs under it.
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    _judge_skip(outcome.get_result(), item.config)


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    outcome = yield
    _judge_skip(outcome.get_result(), collector.config)


def _judge_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    if report.outcome != "skipped" or hasattr(report, "wasxfail") or not config.getoption("no_skips_allowed"):
        return
    assert isinstance(report.longrepr, tuple)
    file, line, reason = report.longrepr
    if not reason.removeprefix("Skipped: ").startswith("host:"):
        report.outcome = "failed"
        report.longrepr = f"{file}:{line}: {reason}\nno fault of the host, so it must not be skipped here"
