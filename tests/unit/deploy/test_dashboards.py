"""Tests of the Grafana dashboards: grafana/ generates them, no panel lies on another, links have targets."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
import yaml

from tests.support.watch_files import (
    BOARDS,
    GRAFANA,
    PANELS,
    RECORDED,
    VARIABLES,
    aggregations,
    columns,
    is_microseconds,
    labels_of,
    panel_queries,
    result_labels,
    selectors,
)

SOURCE = {"uid": "${datasource}", "type": "prometheus"}
BUILT_IN = {"__rate_interval", "__range", "__range_s"}
BURN_WINDOWS = {"1h:1m", "6h:1m"}
"""The ranges of subqueries in the alert LockdObjectiveBurn, and so in the panel that belongs to it."""


def test_the_files_are_what_the_code_makes():
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        pytest.skip("host: grafana_foundation_sdk needs Python 3.11 or later")
    from grafana.__main__ import dashboards

    made = dashboards()
    assert set(made) == {path.name for path in GRAFANA.glob("*.json")}
    for name, text in made.items():
        assert (GRAFANA / name).read_text(encoding="utf-8") == text, "run: make dashboards"


@pytest.mark.parametrize("uid", BOARDS)
def test_the_types_that_grafana_publishes_have_all_that_is_in_them(uid):
    """A dashboard that is read into the SDK's types and written again loses nothing and changes no type."""
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        pytest.skip("host: grafana_foundation_sdk needs Python 3.11 or later")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(BOARDS[uid])))
    assert set(differences(BOARDS[uid], again)) <= {
        *(("annotations", "list", field) for field in ("step", "textFormat", "titleFormat")),
        ("panels", "fieldConfig", "defaults", "custom"),
        ("panels", "panels", "fieldConfig", "defaults", "custom"),
    }, "besides what grafana/frame.py adds to annotations, and that heatmaps get an empty object"


def differences(one, other, where=()):
    """Yield the path of each difference between two JSON values: its keys, without positions in lists."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            if key in one and key in other:
                yield from differences(one[key], other[key], (*where, key))
            else:
                yield *where, key
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for ours, theirs in zip(one, other, strict=True):
            yield from differences(ours, theirs, where)
    elif one != other:
        yield where


def test_there_are_the_four_dashboards():
    assert set(BOARDS) == {"lockd-fleet", "lockd-service", "lockd-host", "lockd-lock"}
    assert all(board["uid"] == uid for uid, board in BOARDS.items())


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_are_told_apart_and_do_not_overlap(uid):
    panels = [panel for board, _, panel in PANELS if board == uid]
    every = panels + [panel for panel in BOARDS[uid]["panels"] if panel["type"] == "row"]
    assert len({p["id"] for p in every}) == len(every)
    assert len({p["title"] for p in every}) == len(every)
    taken = {}
    for p in every:
        g = p["gridPos"]
        assert g["x"] + g["w"] <= 24, p["title"]
        for cell in ((x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])):
            assert cell not in taken, f"{p['title']} lies on {taken.get(cell)}"
            taken[cell] = p["title"]


@pytest.mark.parametrize("uid", BOARDS)
def test_every_line_of_panels_is_full(uid):
    """The panels of a line leave no hole, which would look as if something were missing."""
    lines = {}
    for board, row, p in PANELS:
        if board == uid:
            for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"]):
                lines[row, y] = lines.get((row, y), 0) + p["gridPos"]["w"]
    assert set(lines.values()) == {24}


@pytest.mark.parametrize(
    "uid, panel", [(u, p) for u, _, p in PANELS], ids=[f"{u} {p['title']}" for u, _, p in PANELS]
)
def test_every_panel_says_what_it_shows_and_in_which_unit(uid, panel):
    assert len(panel["description"]) >= 20
    assert panel["datasource"] == SOURCE
    if panel["type"] == "table":
        overrides = panel["fieldConfig"]["overrides"]
        with_unit = {
            o["matcher"]["options"] for o in overrides for prop in o["properties"] if prop["id"] == "unit"
        }
        values = {title for p, field, title in columns() if p is panel and field.startswith("Value")}
        assert with_unit == values
        assert panel["options"]["sortBy"][0]["displayName"] in values
    else:
        assert panel["fieldConfig"]["defaults"]["unit"]


@pytest.mark.parametrize("uid", BOARDS)
def test_variables_are_used_and_there_is_no_other(uid):
    variables = {v["name"]: v for board, v in VARIABLES if board == uid}
    assert list(variables)[:3] == ["datasource", "cluster", "job"]
    # Threads of no known unit have an empty label, targets may have no cluster, and a job of which no host
    # answers is not in the list: All must match them.
    assert all(variables[name]["allValue"] == ".*" for name in ("cluster", "job", "unit", "comm", "instance")
               if variables.get(name, {}).get("includeAll"))  # fmt: skip
    used = set()
    for board, row, panel, target in panel_queries():
        if board == uid:
            assert target["datasource"] == SOURCE, panel["title"]
            used |= set(re.findall(r"\$(\w+)", " ".join((target["expr"], panel["title"], row))))
    assert used - BUILT_IN == set(variables) - {"datasource"}
    known = ["datasource"]
    for name, variable in list(variables.items())[1:]:
        assert variable["datasource"] == SOURCE
        asked = set(re.findall(r"\$(\w+)", variable["query"]["query"]))
        assert asked <= set(known), f"{name} needs what is chosen after it"
        known.append(name)


@pytest.mark.parametrize("uid", BOARDS)
def test_annotations_show_deadlocks_and_alerts_of_what_was_chosen(uid):
    deadlocks, alerts = BOARDS[uid]["annotations"]["list"]
    assert deadlocks["expr"].startswith("lockd_deadlocks{cluster=")
    assert alerts["expr"].startswith("ALERTS{cluster=")


@pytest.mark.parametrize("uid", BOARDS)
def test_links_lead_to_dashboards_and_carry_variables_that_these_have(uid):
    others = {link["url"] for link in BOARDS[uid]["links"]}
    assert others == {f"/d/{other}" for other in BOARDS if other != uid}
    assert all(link["includeVars"] and link["keepTime"] for link in BOARDS[uid]["links"])
    for board, _, panel in PANELS:
        if board == uid and panel["type"] == "table":
            labels = {field for p, field, _ in columns() if p is panel}
            for override in panel["fieldConfig"]["overrides"]:
                for prop in override["properties"]:
                    for link in prop["value"] if prop["id"] == "links" else ():
                        check_link(link["url"], labels)


def check_link(url, labels):
    target, _, query = url.removeprefix("/d/").partition("?")
    assert target in BOARDS
    assert query.startswith("${datasource:queryparam}&") and "&${__url_time_range}&" in query
    for name in ("cluster", "job"):  # of the row if the link is about one host, else as chosen
        of_row = f"var-{name}=${{__data.fields.{name}:percentencode}}" in query
        assert of_row == ("var-instance=" in query) != (f"${{{name}:queryparam}}" in query)
    # Grafana writes several values as {a,b}, and only ${name:queryparam} repeats var-name= for each.
    assert not re.search(r"=\$\{(?!__)\w+\}", query)
    named = re.findall(r"var-(\w+)=", query) + re.findall(r"\$\{(\w+):queryparam\}", query)
    assert set(named) <= {v["name"] for board, v in VARIABLES if board == target}
    assert set(re.findall(r"__data\.fields\.(\w+)", query)) <= labels


@pytest.mark.parametrize(
    "uid, panel, target",
    [(u, p, t) for u, _, p, t in panel_queries()],
    ids=[f"{u} {p['title']} {t['refId']}" for u, _, p, t in panel_queries()],
)
def test_panel_query(uid, panel, target):
    expr = target["expr"]
    used = selectors(expr)
    assert used or "up{" in expr
    for name, pairs in used:
        check_choice(uid, name, pairs)
    ranges = set(re.findall(r"\[([^\]]+)\]", expr))
    allowed = {"table": {"$__range"}, "stat": {"$__rate_interval", "$__range"}}
    if "present_over_time(" in expr:  # for counters that begin with their first event
        ranges -= {"1d"}
    assert ranges <= allowed.get(panel["type"], {"$__rate_interval"} | BURN_WINDOWS)
    assert target["instant"] == (panel["type"] == "table")
    if panel["type"] == "heatmap":
        assert target["format"] == "heatmap" and target["legendFormat"] == "{{le}}"
        assert re.fullmatch(
            r"sum by \(le\) \((?:increase\(lockd_\w+_bucket\{[^}]*\}\[\$__rate_interval\]\)"
            r"|\w+:lockd_\w+_bucket:rate5m\{[^}]*\})\)",
            expr,
        )
        assert panel["options"]["calculate"] is False and panel["options"]["yAxis"]["unit"] == "s"
    elif panel["type"] != "table":
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        labels = result_labels(expr)
        # Hosts are told apart by cluster and name: two jobs for one host are rare.
        assert legend <= labels and (labels - legend <= {"job"} or not aggregations(expr))
        microseconds = any(is_microseconds(name) for name, _ in used) and not expr.startswith("count(")
        assert (panel["fieldConfig"]["defaults"]["unit"] == "µs") == microseconds


def check_choice(uid, name, pairs):
    """Check that a query selects what the user has chosen in the variables, and nothing else."""
    if name.startswith("unit:"):
        assert pairs == {"unit": "$unit"}  # an objective is for a unit, wherever that runs
        return
    assert (pairs["cluster"], pairs["job"]) == ("$cluster", "$job"), name
    labels = labels_of(name)
    if uid in ("lockd-host", "lockd-service", "lockd-lock") and name not in RECORDED:
        assert pairs["instance"] == "$instance", name
    if uid == "lockd-host" and {"unit", "comm"} <= labels:
        assert (pairs["unit"], pairs["comm"]) == ("$unit", "$comm"), name
    if uid == "lockd-service" and "unit" in labels:
        assert pairs["unit"] == "$unit", name
    if uid == "lockd-lock" and "lock" in labels:
        assert (pairs["lock"], pairs["comm"]) == ("$lock", "$comm"), name


def test_hosts_of_one_name_in_two_clusters_are_told_apart():
    for uid, _, panel, target in panel_queries():
        if '="$instance"' not in target["expr"]:  # which is one host
            for labels, _ in aggregations(target["expr"]):
                assert "instance" not in labels or {"cluster", "job"} <= set(labels), (uid, panel["title"])
            assert "{{instance}}" not in target["legendFormat"] or "{{cluster}}" in target["legendFormat"]


def test_table_columns():
    for panel, field, title in columns():
        values = (
            {f"Value #{t['refId']}" for t in panel["targets"]} if len(panel["targets"]) > 1 else {"Value"}
        )
        labels = set.union(*(result_labels(t["expr"]) for t in panel["targets"]))
        assert field in values | labels, panel["title"]
        if not field.startswith("Value"):
            continue
        target = next(t for t in panel["targets"] if field in ("Value", f"Value #{t['refId']}"))
        microseconds = any(is_microseconds(name) for name, _ in selectors(target["expr"]))
        units = {
            prop["value"]
            for o in panel["fieldConfig"]["overrides"]
            if o["matcher"]["options"] == title
            for prop in o["properties"]
            if prop["id"] == "unit"
        }
        assert (units == {"µs"}) == microseconds, f"{panel['title']}: {title}"


def test_provisioning_finds_the_dashboards():
    found = {
        path.parent.name: yaml.safe_load(path.read_text()) for path in GRAFANA.glob("provisioning/*/*.yml")
    }
    assert set(found) == {"dashboards", "datasources"}
    (provider,) = found["dashboards"]["providers"]
    assert provider["type"] == "file" and provider["options"]["path"]
    (source,) = found["datasources"]["datasources"]
    assert source["type"] == "prometheus"


def test_texts_are_as_people_read_them():
    """The files have µs and not \\u00b5s, so that the diff of a changed text can be read."""
    for path in GRAFANA.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
