"""What is said, and what is refused, on a kernel where programs that write to a ring buffer may sleep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockd.errors import HostError
from lockd.load import doctor, loader
from lockd.load.host import SLEEPING_RINGS
from lockd.load.settings import LoadSettings, Trace

DAEMON = LoadSettings(("futex",), 8192, 16_384, 64, 0, 1, "contention", "blocked", ())


@pytest.fixture(autouse=True)
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    types = SimpleNamespace(bit_offset=lambda *_: 0)
    for module in (loader, doctor):
        monkeypatch.setattr(module, "KernelTypes", lambda: types)
        monkeypatch.setattr(module, "require_privileges", lambda: None)
        monkeypatch.setattr(module, "require_pids_of_the_host", lambda: None)
    monkeypatch.setattr(loader, "_load", lambda *_: "loaded")
    monkeypatch.setattr(doctor, "ensure_tracefs", lambda: None)  # it may mount


@pytest.mark.parametrize("ring", ["signals", "snooped"])
def test_a_tool_that_needs_a_ring_is_refused(ring: str) -> None:
    trace = Trace(maps=(ring, "another"))
    settings = LoadSettings((), 8192, 16_384, 64, 0, 1, "contention", "blocked", (), trace=trace)
    with pytest.raises(HostError, match="PREEMPT_RT"):
        loader.load(settings)


def test_the_daemon_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    loaded: Any = loader.load(DAEMON)
    assert loaded == "loaded"
    (record,) = caplog.records
    assert "no holders of locks" in record.getMessage() and SLEEPING_RINGS in record.getMessage()


def test_doctor_says_it_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor._check_host()
    printed = capsys.readouterr().out
    assert f"\nrings       no: {SLEEPING_RINGS}\n" in printed
    assert "nothing can run here" not in printed
