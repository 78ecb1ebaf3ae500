"""Rules for the tests of all tiers: which tier a test belongs to, when it may be skipped or tried again."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import tries

TIERS = {"kernel", "system", "vm"}
THOROUGH = "thorough"
HERE = Path(__file__).parent

# Tests with Hypothesis have no deadline: the machine may be slow at the moment.
settings.register_profile("lockd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockd")


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A script that starts this in the background has SIGINT ignored. The programs under test would inherit
    # that, and Ctrl-C would not end them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Python's own settings, such as PYTHONUNBUFFERED in a container's image, hide faults that users meet.
for variable in [name for name in os.environ if name.startswith("PYTHON")]:
    del os.environ[variable]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips-allowed",
        action="store_true",
        default=os.environ.get("CI", "") not in ("", "0", "false"),
        help="a skip fails unless its reason starts with `host:`, that is unless this host cannot do it;"
        " on by itself where CI is set, and given by tests.run",
    )
    parser.addoption(
        "--gate",
        action="store_true",
        help=f"leave out the tests marked `{THOROUGH}`, which `make test-all` runs and `make test` does not",
    )
    parser.addoption(
        "--without",
        action="append",
        default=[],
        metavar="VALUE",
        help="leave out the tests that have a parameter of this value; may be given several times",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test the marker of its tier, for `pytest -m 'not system'`; obey --gate and --without."""
    for item in items:
        if HERE in item.path.parents and (tier := item.path.relative_to(HERE).parts[0]) in TIERS:
            item.add_marker(tier)
        for marker in item.iter_markers(THOROUGH):
            why = marker.args[0] if marker.args else ""
            assert isinstance(why, str) and why, f"{item.nodeid}: {THOROUGH} says why, as its one argument"
    gate, without = config.getoption("gate"), set(config.getoption("without"))

    def is_left_out(item: pytest.Item) -> bool:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        is_thorough = item.get_closest_marker(THOROUGH) is not None
        return (gate and is_thorough) or any(isinstance(one, str) and one in without for one in values)

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if used := tries.used():
        item.user_properties.append((tries.TRIES, 1 + sum(used) - len(used)))


class FurtherTries:
    """Counts the tries beyond the first of each test; too many fail the run."""

    def __init__(self) -> None:
        self._may = 0
        """The number of tests that may try again."""
        self._by_test: dict[str, int] = {}

    @property
    def _sum(self) -> int:
        return sum(self._by_test.values())

    @property
    def _are_too_many(self) -> bool:
        return self._sum > tries.allowance(self._may)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        used = [int(str(value)) for name, value in report.user_properties if name == tries.TRIES]
        if report.when == "teardown" and used:
            self._may += len(used)
            if further := sum(used) - len(used):
                self._by_test[report.nodeid] = further

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._are_too_many and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for test, count in self._by_test.items():
            terminalreporter.write_line(f"further tries: {count}: {test}")
        if self._may:
            words = f"further tries: {self._sum}, of {self._may} tests; {tries.allowance(self._may)} may be"
            is_too_many = self._are_too_many
            terminalreporter.write_line(("FAILED: " if is_too_many else "") + words, red=is_too_many)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # in a worker of xdist: its reports come to the first process
        config.pluginmanager.register(FurtherTries())


# These wrappers are of the old kind (hookwrapper), which pytest 7 of Debian 12 knows too: the tier vm runs
# under that pytest.
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
