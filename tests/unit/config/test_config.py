"""The configuration: defaults, the shipped file, and good values of every key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockd.config import docs
from lockd.config.reader import Key, all_keys, read_text
from lockd.config.schema import AUTO, Config, Window, default, load
from lockd.load.settings import LoadSettings
from lockd.service.start import load_settings

SHIPPED = Path(__file__).parents[3] / "config" / "lockd.yaml"
MS, S, MINUTE, HOUR = 10**6, 10**9, 60 * 10**9, 3600 * 10**9


def parse(text: str) -> Config:
    return read_text(Config, text, "lockd.yaml")


def leaves(tree: object, above: str = "") -> set[str]:
    if not isinstance(tree, dict):
        return {above}
    return {leaf for key, value in tree.items() for leaf in leaves(value, f"{above}.{key}")}


# --- Defaults and the shipped file --------------------------------------------------------------


def test_defaults() -> None:
    config = load(None)
    assert config == default()
    assert config.period_ns == 50 * MS
    assert config.windows == (Window("1m", MINUTE), Window("5m", 5 * MINUTE))
    programs = config.programs
    assert programs.futex.enabled and programs.offcpu.enabled and programs.kernel_locks.enabled
    assert (programs.futex.mode, programs.futex.mechanism) == ("blocked", "auto")
    assert (programs.kernel_locks.mode, programs.kernel_locks.mechanism) == ("contention", "auto")
    filters = config.filter
    assert filters.units == filters.comms == filters.exclude_comms == ()
    assert filters.pids == ()
    assert (filters.min_block_ns, filters.max_block_ns) == (0, None)
    assert config.histogram.buckets_us == tuple(4**n for n in range(14))
    assert dataclasses.astuple(config.series) == (10000, HOUR, 50)
    assert dataclasses.astuple(config.maps) == (AUTO, AUTO, 1024)
    assert config.names.parked == ()
    assert [config.budget.share(cpus) for cpus in (1, 2, 10, 64)] == [0.2, 0.1, 0.02, 0.02]
    assert config.web.listen == (("127.0.0.1", 9776),)
    assert config.web.config_file is None
    assert config.log.level == "info"


def test_the_shipped_file_is_the_defaults() -> None:
    assert load(SHIPPED) == default()


def test_the_shipped_file_has_every_key_with_a_comment() -> None:
    text = SHIPPED.read_text()
    grammar = {f".{name}" for name, about in all_keys(Config) if isinstance(about, Key)}
    assert leaves(yaml.safe_load(text)) == grammar
    above = ""
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            assert above.lstrip().startswith("# "), f"no comment above: {line}"
        above = line


def test_the_shipped_file_is_up_to_date() -> None:
    assert SHIPPED.read_text() == docs.as_yaml()


def test_every_shipped_value_can_be_changed_on_its_own() -> None:
    """Each key changes the field of its own name, and no other."""
    of_calls = {"programs.futex.mode": "calls"}
    others = of_calls | {
        "period": "100ms",
        "programs.futex.enabled": "false",
        "programs.offcpu.enabled": "false",
        "programs.kernel_locks.enabled": "false",
        "programs.futex.mechanism": "kprobe",
        "programs.offcpu.mechanism": "tracepoint",
        "programs.kernel_locks.mode": "all",
        "programs.kernel_locks.mechanism": "tracepoint",
        "filter.units": '["nginx.service"]',
        "filter.comms": "[nginx]",
        "filter.exclude_comms": '["*"]',
        "filter.pids": "[1]",
        "filter.min_block": "1ms",
        "filter.max_block": "1s",
        "windows": "[10s]",
        "histogram.buckets_us": "[1, 2]",
        "series.max": "5000",
        "series.idle": "2h",
        "series.top_locks": "7",
        "maps.entries": "64",
        "maps.threads": "64",
        "maps.stacks": "64",
        "names.parked": '["app:gate"]',
        "profile.samples_per_second": "5",
        "profile.waits_per_second": "5",
        "budget.cpu": "0.5%",
        "budget.requests": "50%",
        "web.listen": '[":1"]',
        "web.config_file": "/etc/web.yml",
        "log.level": "debug",
    }
    assert set(others) == {name for name, about in all_keys(Config) if isinstance(about, Key)}
    for name, value in others.items():
        beside = of_calls if name == "programs.futex.mechanism" else {}
        before = dataclasses.asdict(parse(yaml_of(beside)))
        after = dataclasses.asdict(parse(yaml_of({**beside, name: value})))
        changed = {path for path in leaves(after) if _at(after, path) != _at(before, path)}
        assert {path.removesuffix("_ns") for path in changed} == {f".{name}"}


def yaml_of(keys: dict[str, str]) -> str:
    """Return the text of a configuration with these values, which are given by dotted names of keys."""
    tree: dict[str, Any] = {}
    for name, value in keys.items():
        *sections, last = name.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = yaml.safe_load(value)
    return yaml.safe_dump(tree)


def _at(tree: dict[str, object], path: str) -> object:
    found: object = tree
    for part in path[1:].split("."):
        assert isinstance(found, dict)
        found = found[part]
    return found


def test_config_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        default().period_ns = 1  # type: ignore[misc]  # who checks types sees it too


# --- Good values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}", "filter:\n", "\ufeff", "null"])
def test_nothing_means_the_defaults(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lockd.yaml"
    file.write_text(text, encoding="utf-8")
    assert load(file) == default()


def test_values_of_every_type() -> None:
    config = parse(
        """
        period: 1s
        programs: {offcpu: {enabled: False}, kernel_locks: {mechanism: tracepoint}}
        filter:
          units: ["nginx.service", "user@*"]
          comms: ["a-name-longer-than-15*", "42"]
          pids: [1, 4_194_304]
          min_block: 100us
          max_block: 1h30m
        windows: [10s, 90s, 1d]
        histogram: {buckets_us: [2, 8, 67108864]}
        series: {max: 5000, idle: 2d}
        maps: {entries: 64, stacks: 1048576}
        web: {listen: ["[::1]:80", ":9776", "lock-host.example:0"], config_file: /etc/web.yml}
        log: {level: debug}
        """
    )
    assert config.period_ns == S
    assert not config.programs.offcpu.enabled and config.programs.futex.enabled
    assert config.programs.kernel_locks.mechanism == "tracepoint"
    assert config.filter.units == ("nginx.service", "user@*")
    assert config.filter.comms == ("a-name-longer-than-15*", "42")
    assert config.filter.pids == (1, 4194304)
    assert config.filter.min_block_ns == 100_000
    assert config.filter.max_block_ns == 90 * MINUTE
    assert [w.name for w in config.windows] == ["10s", "90s", "1d"]
    assert config.windows[1].ns == 90 * S
    assert config.histogram.buckets_us == (2, 8, 67108864)
    assert (config.series.max, config.series.idle_ns) == (5000, 48 * HOUR)
    assert (config.maps.entries, config.maps.stacks) == (64, 1048576)
    assert config.web.listen == (("::1", 80), ("", 9776), ("lock-host.example", 0))
    assert config.web.config_file == Path("/etc/web.yml")
    assert config.log.level == "debug"


@pytest.mark.parametrize("word", ["none", "null", "~", ""])
def test_no_upper_limit_on_waits(word: str) -> None:
    assert parse(f"filter:\n  max_block: {word}\n").filter.max_block_ns is None


@pytest.mark.parametrize("word", ["none", "null", "~", ""])
def test_no_budget(word: str) -> None:
    assert parse(f"budget:\n  cpu: {word}\n").budget.cpu is None


@pytest.mark.parametrize(
    ("written", "share"), [("2%", 0.02), ("0.01%", 0.0001), ("12.5%", 0.125), ("100%", 1)]
)
def test_a_budget_is_a_share(written: str, share: float) -> None:
    assert parse(f"budget: {{cpu: {written}}}").budget.cpu == pytest.approx(share)


def test_anchors_work() -> None:
    config = parse("filter: {comms: &names [x], exclude_comms: *names}")
    assert config.filter.exclude_comms == ("x",)


@pytest.mark.parametrize(
    ("cpus", "gigabytes", "entries", "threads"),
    [
        (1, 1, 8192, 16_384),
        (2, 8, 8192, 16_384),
        (16, 64, 8192, 65_536),
        (24, 31, 16_384, 32_768),
        (64, 256, 32_768, 262_144),
        (192, 768, 131_072, 262_144),
        (512, 2048, 262_144, 262_144),
        (8192, 65_536, 262_144, 262_144),
    ],
)
def test_maps_fit_the_machine(cpus: int, gigabytes: int, entries: int, threads: int) -> None:
    maps = default().maps.for_machine(cpus, gigabytes * 10**9)
    assert dataclasses.astuple(maps) == (entries, threads, 1024)


def test_sizes_in_the_file_hold_on_every_machine(tmp_path: Path) -> None:
    possible = tmp_path / "devices/system/cpu/possible"
    possible.parent.mkdir(parents=True)
    possible.write_text("0-63,128-191\n")
    settings = load_settings(parse("maps: {threads: 64}"), tmp_path, 10**12)
    assert (settings.entries, settings.threads, settings.stacks, settings.cpus) == (65_536, 64, 1024, 128)
    possible.write_text("0\n")
    settings = load_settings(parse("maps: {entries: 1048576, threads: auto}"), tmp_path, 10**12)
    assert (settings.entries, settings.threads) == (1_048_576, 262_144)


def test_what_the_loader_is_asked_for_survives_the_way_there() -> None:
    config = parse(
        """
        programs:
          futex: {mode: calls, mechanism: kprobe}
          offcpu: {enabled: false, mechanism: tracepoint}
          kernel_locks: {mode: all, mechanism: fentry}
        filter: {min_block: 1ms}
        maps: {entries: 128, threads: 256, stacks: 64}
        """
    )
    settings = load_settings(config)
    assert settings.programs == ("futex", "kernel_locks")
    assert settings.mechanisms == (("futex", "kprobe"), ("kernel_locks", "fentry"))
    assert (settings.futex_mode, settings.lock_mode) == ("calls", "all")
    assert (settings.entries, settings.threads, settings.stacks) == (128, 256, 64)
    assert (settings.min_block_ns, settings.max_block_ns) == (MS, 2**63 - 1)
    assert LoadSettings.from_json(settings.to_json()) == settings
