"""The report of the bench, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench import results
from bench.fleet.recording import Recording

DAY = 86_400
HEAD_HOURS = 2
"""The length, in hours, of the blocks that Prometheus writes before it compacts them."""
SLOWEST = 12
FAMILIES = 8


def families(recording: Recording) -> dict[str, int]:
    """The numbers of lines of the largest metrics. Buckets, sums and counts of a histogram count apart."""
    counts: Counter[str] = Counter()
    for series in recording.series():
        counts[series.partition("{")[0]] += 1
    return dict(counts.most_common(FAMILIES))


def text(host: Mapping[str, str], figures: Mapping[str, Any]) -> str:
    parts = ["# What a fleet costs one Prometheus\n", results.table("host | ", host.items())]
    if "record" in figures:
        parts += ["## The hosts that were recorded\n", *_recorded(figures["record"])]
    runs = [one for name, one in figures.items() if name.startswith("scrape-")]
    if runs:
        runs.sort(key=lambda run: run["series"])
        parts += ["## Scraped by one Prometheus\n", *_scraped(runs)]
    if "agent" in figures:
        parts += ["## In agent mode\n", _agent(figures["agent"])]
    ranges = {name: one for name, one in figures.items() if name.startswith("ask-")}
    if ranges:
        parts += ["## The dashboards\n", *_asked(figures["week"], ranges)]
    return "\n".join(parts)


def _recorded(recorded: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (one["stage"], one["series.max"], one["of ten"], f"{one['lines']:,}", f"{one['bytes'] / 1e3:.0f}",
         f"{one['new series an hour']:,.0f}")
        for one in recorded.values()
    ]  # fmt: skip
    head = "host | series.max | of ten hosts | lines | kB compressed | new series of new processes, an hour"
    yield results.table(head, rows)
    for most in dict.fromkeys(one["series.max"] for one in recorded.values()):
        of_ten = [one for one in recorded.values() if one["series.max"] == most]
        mean = sum(one["lines"] * one["of ten"] for one in of_ten) / 10
        yield f"With `series.max` {most:,} the mean host has {mean:,.0f} lines.\n"
    last = max(recorded.values(), key=lambda one: one["lines"])
    yield f"The largest, of {last['lines']:,} lines:\n"
    yield results.table("lines | of", [(f"{count:,}", name) for name, count in last["families"].items()])


def _scraped(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("`series.max`", *(f"{run['series.max']:,}" for run in runs))]

    def row(name: str, shape: str, value: Any) -> None:
        rows.append((name, *(shape.format(value(run)) for run in runs)))

    row("scraped well", "{:,}", lambda run: run["scraped"])
    row("active series", "{:,}", lambda run: run["series"])
    row("series of a host", "{:,.0f}", lambda run: run["series"] / run["hosts"])
    row("new series a second", "{:,.0f}", lambda run: run["new_series"])
    row("samples a second", "{:,.0f}", lambda run: run["samples"])
    row("processors that Prometheus takes", "{:.2f}", lambda run: run["processors"])
    row("microseconds of processor for a sample, rules included", "{:.1f}",
        lambda run: run["processors"] / run["samples"] * 1e6)  # fmt: skip
    row("processors that the simulated hosts take", "{:.2f}", lambda run: run["simulation"])
    row("a scrape of a host, median, s", "{:.3f}", lambda run: run["scrape_seconds"][0])
    row("a scrape of a host, 99%, s", "{:.3f}", lambda run: run["scrape_seconds"][1])
    row("between two scrapes, 99%, s", "{:.2f}", lambda run: run["interval_seconds"])
    row("resident memory, GB", "{:.2f}", lambda run: run["resident"] / 1e9)
    row("resident memory of a series, kB", "{:.2f}", lambda run: run["resident"] / run["series"] / 1e3)
    row("objects in use, GB", "{:.2f}", lambda run: run["heap"] / 1e9)
    row("alerts", "{:,}", lambda run: run["alerts"])
    row("write-ahead log, GB an hour", "{:.2f}", lambda run: run["log_bytes"] * 3600 / 1e9)
    row("a sample in a block, bytes", "{:.2f}", lambda run: run["chunk_bytes"])
    row("a series in the index of a block, bytes", "{:.0f}", lambda run: run["index_bytes"])
    row("disk a day, GB: samples", "{:.1f}", lambda run: run["samples"] * DAY * run["chunk_bytes"] / 1e9)
    row("disk a day, GB: indexes of blocks of two hours", "{:.1f}",
        lambda run: run["series"] * run["index_bytes"] * 24 / HEAD_HOURS / 1e9)  # fmt: skip
    yield results.table("of so many hosts | " + " | ".join(f"{run['hosts']:,}" for run in runs), rows)
    yield "Memory is that after some minutes; the last two lines are arithmetic from the two before.\n"
    yield "### Rules\n\nSeconds that an evaluation takes: the last one of a group, the longest of a rule.\n"
    head = "group | " + " | ".join(f"{run['hosts']:,} hosts, {run['series']:,} series" for run in runs)
    groups = [(name, *(_group(run["groups"][name]) for run in runs)) for name in runs[-1]["groups"]]
    yield results.table(head, groups)
    slowest = sorted(runs[-1]["rules"], key=lambda name: -runs[-1]["rules"][name])[:SLOWEST]
    yield results.table(
        head.replace("group", "rule"),
        [(name, *(f"{run['rules'][name]:.2f}" for run in runs)) for name in slowest],
    )
    yield "### Dashboards, while it scrapes\n\nOver five minutes; seconds.\n"
    yield _boards({f"{run['hosts']:,} hosts, {run['series']:,} series": run["asked"] for run in runs})


def _agent(run: Mapping[str, Any]) -> str:
    rows = [
        ("active series", f"{run['series']:,}"),
        ("samples sent a second", f"{run['samples']:,.0f}"),
        ("samples that wait to be sent, at the end", f"{run['pending']:,.0f}"),
        ("MB sent a second", f"{run['sent_bytes'] / 1e6:.2f}"),
        ("bytes sent for a sample", f"{run['sent_bytes'] / run['samples']:.1f}"),
        ("processors", f"{run['processors']:.2f}"),
        ("resident memory, GB", f"{run['resident'] / 1e9:.2f}"),
        ("resident memory of a series, kB", f"{run['resident'] / run['series'] / 1e3:.2f}"),
        ("write-ahead log, GB", f"{run['log_bytes'] / 1e9:.2f}"),
    ]
    return results.table(f"{run['hosts']:,} hosts, `series.max` {run['series.max']:,} | ", rows)


def _group(group: Mapping[str, float]) -> str:
    return f"{group['seconds']:.2f}" + (f", {group['missed']:.0f} left out" if group["missed"] else "")


def _boards(asked: Mapping[str, Any]) -> str:
    """The table of dashboards: the slowest query and all queries together, for each fleet and time range."""
    boards = list(next(iter(asked.values())))
    rows = []
    for board in boards:
        cells = []
        for found in asked.values():
            alone = [query["seconds"] for query in found[board]["queries"]]
            at_once = "-" if found[board]["all"] is None else f"{found[board]['all']:.2f}"
            cells.append(f"{max(alone):.2f} / {sum(alone):.2f} / {at_once}")
        rows.append((board, *cells))
    return results.table("slowest query / all, one by one / all at once | " + " | ".join(asked), rows)


def _asked(week: Mapping[str, Any], ranges: Mapping[str, Any]) -> Iterator[str]:
    samples, size = week["samples"], week["bytes"]
    yield (
        f"A week of 1, 100 and 1,000 hosts: {week['series']:,} series, {samples:,} samples,"
        f" {size / 1e9:.1f} GB, {size / samples:.2f} bytes a sample. The service is {week['unit']},"
        f" the lock {week['lock']}.\n"
    )
    names = sorted(ranges, key=lambda name: tuple(map(float, name.split("-")[1:])))
    titles = {}
    for name in names:
        hosts, hours = name.split("-")[1:]
        titles[f"{int(hosts):,} hosts, {hours} h"] = ranges[name]
    yield _boards(titles)
    yield "### Every query\n\nMilliseconds, and the rows of the answer.\n"
    rows = []
    for board in next(iter(titles.values())):
        for place, query in enumerate(next(iter(titles.values()))[board]["queries"]):
            cells = [_cell(found[board]["queries"][place]) for found in titles.values()]
            rows.append((board.removeprefix("lockd-"), query["panel"], *cells))
    yield results.table("dashboard | panel and query | " + " | ".join(titles), rows)


def _cell(query: Mapping[str, Any]) -> str:
    return query["error"] or f"{query['seconds'] * 1e3:,.0f}; {query['rows']:,}"
