"""Every metric and every label value is documented with its definition, and nothing else is.

The documented commands that make users are tried as well.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from docs import generate
from lockd.export.catalog import CATALOG, Metric
from tests.needs import needs
from tests.support.watch_files import RECORDED

ROOT = Path(__file__).resolve().parents[2]
METRICS = ROOT / "docs/metrics.md"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/runbooks/*.md"))]
ROW = re.compile(r"\| `(?P<name>lockd_\w+)` \| (?P<kind>\w+) \| (?P<labels>.*?) \| (?P<definition>.*) \|")
NAME = re.compile(r"\blockd_[a-z0-9_]*[a-z0-9]\b(?!\.|/|\*)")
PARTS = ("_bucket", "_sum", "_count")


def test_the_page_is_up_to_date() -> None:
    assert METRICS.read_text() == generate.as_markdown(), "run: python3 -m docs.generate > docs/metrics.md"


@pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG)
def test_every_metric_is_documented_with_its_definition(metric: Metric) -> None:
    rows = [row for line in METRICS.read_text().splitlines() if (row := ROW.fullmatch(line))]
    (row,) = [row for row in rows if row["name"] == metric.name]
    assert row["kind"] == metric.kind
    assert row["definition"] == metric.help
    labels = re.findall(r"`(\w+)`", row["labels"])
    base = ["unit", "comm"] if list(metric.labels[:2]) == ["unit", "comm"] else []
    assert base + labels == list(metric.labels)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_no_page_names_a_metric_that_is_not(page: Path) -> None:
    text = page.read_text()
    for recorded in RECORDED:  # the names of recording rules contain names of metrics
        text = text.replace(recorded, "")
    for name in NAME.findall(text):
        whole = next((name.removesuffix(part) for part in PARTS if name.endswith(part)), name)
        assert name in CATALOG or CATALOG[whole].kind == "histogram", name


def test_the_page_defines_the_terms_of_the_contract() -> None:
    text = METRICS.read_text()
    for term in ("blocked time of a futex wait", "sys time of a futex call", "off-CPU time", "runqueue time"):
        assert f"| {term} |" in text
    for term in ("kernel-lock wait", "kernel-lock hold", "maximum over a `window`", "kind of a futex wait"):
        assert f"| {term} |" in text
    assert "never reset by a scrape" in text


def test_every_label_value_is_documented() -> None:
    for table, values in generate.values_in_the_code().items():
        assert set(getattr(generate, table)) == values, table


def test_every_group_has_metrics() -> None:
    assert {generate.group_of(metric) for metric in CATALOG.values()} == set(generate.GROUPS)


@needs("systemd-sysusers")
def test_the_users_are_made_as_documented(tmp_path: Path) -> None:
    """The commands of the documents are typed in a checkout; here they only say what they would do."""
    commands = [
        command
        for page in PAGES
        for command in re.findall(
            r"^\$ sudo (systemd-sysusers .*?)(?: +#.*)?$", page.read_text(), re.MULTILINE
        )
    ]
    assert commands
    for command in commands:
        harmless = command.replace("systemd-sysusers", f"systemd-sysusers --dry-run --root={tmp_path}")
        done = subprocess.run(["sh", "-c", harmless], cwd=ROOT, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {"'lockd'", "'lockd-namer'"} <= set(re.findall(r"Creating user (\S+)", done.stderr)), command
