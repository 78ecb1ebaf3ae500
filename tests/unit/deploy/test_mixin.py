"""Tests of mixin.libsonnet: it gives the committed files, or these with the user's own addresses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.support.watch_files import BOARDS, MIXIN, RECORDING, RULES

jsonnet = pytest.importorskip("_jsonnet", reason="host: no jsonnet for this Python")


def evaluated(field: str, config: str = "{}") -> Any:
    code = f"((import '{MIXIN}') + {{_config+:: {config}}}).{field}"
    return json.loads(jsonnet.evaluate_snippet("test", code))


def test_it_gives_the_files_that_are_committed() -> None:
    assert evaluated("prometheusAlerts") == yaml.safe_load(RULES.read_text())
    assert evaluated("prometheusRules") == yaml.safe_load(RECORDING.read_text())
    assert evaluated("grafanaDashboards") == {f"{uid}.json": board for uid, board in BOARDS.items()}


def test_its_configuration_is_taken() -> None:
    config = "{runbooks: 'https://wiki/lockd/', job: 'locks'}"
    alerts = [rule for group in evaluated("prometheusAlerts", config)["groups"] for rule in group["rules"]]
    assert {rule["annotations"]["runbook_url"] for rule in alerts} == {
        f"https://wiki/lockd/{rule['alert']}.md" for rule in alerts
    }
    (down,) = [rule for rule in alerts if rule["alert"] == "LockdDown"]
    assert down["expr"] == 'up{job="locks"} == 0 or absent(up{job="locks"})'
