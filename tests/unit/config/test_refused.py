"""Configurations that are refused: the messages say all that is wrong, where, and the rule of each key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lockd.config.reader import all_keys, read_text
from lockd.config.rules import UNITS_NS, parse_address, parse_duration
from lockd.config.schema import Config, load
from lockd.errors import ConfigError


def parse(text: str) -> Config:
    return read_text(Config, text, "lockd.yaml")


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_what_is_said_of_a_key_has_no_terminal_escapes() -> None:
    (problem,) = problems('"\\e[2J": 1')
    assert problem.startswith("lockd.yaml:1: \\x1b[2J: unknown key; ")


# --- Bad values -----------------------------------------------------------------------------------

PERIOD = "is not a duration from 10ms to 10s"
WINDOWS = "is not a list of 1 to 4 different durations, each from 10s to 24h"
BUCKETS = "is not a list of powers of two from 1 to 67108864, each larger than the last"
COMM = "is not a string: a name of at most 15 bytes, or a shell pattern"
SHARE = "a share from 0.01% to 100%, or auto, or none"
SECTIONS = "period, programs, filter, windows, histogram, series, maps, names, profile, budget, web, log"
OFF = "{enabled: false}"
FINE = [2**power for power in range(27)]
NO_ROOM = "leaves no room for series besides those called `other`"
ADDRESS = "is not HOST:PORT, such as 127.0.0.1:9776, [::1]:9776 or :9776 for every interface"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("period: 50", f"period: 50 {PERIOD}"),
        ("period: 0", f"period: 0 {PERIOD}"),
        ("period: 9ms", f"period: 9ms {PERIOD}"),
        ("period: 10001ms", f"period: 10001ms {PERIOD}"),
        ("period: -50ms", f"period: -50ms {PERIOD}"),
        ("period: 1.5s", f"period: 1.5s {PERIOD}"),
        ("period: 50 ms", f"period: 50 ms {PERIOD}"),
        ("period: 1:30", f"period: 1:30 {PERIOD}"),
        ("period:", f"period: nothing {PERIOD}"),
        ("period: [50ms]", f"period: [50ms] {PERIOD}"),
        ("period: !secret 50ms", f"period: !secret 50ms {PERIOD}"),
        ("period: {a: 1}", f"period: {{a: 1}} {PERIOD}"),
        ("programs: {futex: {enabled: yes}}", "programs.futex.enabled: yes is not true or false"),
        ("programs: {futex: {enabled: 1}}", "programs.futex.enabled: 1 is not true or false"),
        (
            "programs: {futex: true}",
            "programs.futex: true is not a section with the keys enabled, mechanism, mode",
        ),
        ("programs: {futex: {mode: all}}", "programs.futex.mode: all is not one of blocked, calls"),
        (
            "programs: {kernel_locks: {mode: al}}",
            "programs.kernel_locks.mode: al is not one of contention, all",
        ),
        (
            "programs: {futex: {mechanism: kprobes}}",
            "programs.futex.mechanism: kprobes is not one of auto, tracepoint, fentry, kprobe",
        ),
        *(
            (
                f"programs: {{futex: {{{mode}mechanism: {mechanism}}}}}",
                f"programs.futex.mechanism: {mechanism} takes effect in mode calls only, and the mode is "
                "blocked",
            )
            for mode, mechanism in (("", "fentry"), ("mode: blocked, ", "kprobe"), ("", "tracepoint"))
        ),
        (
            "programs: {kernel_locks: {mode: all, mechanism: tracepoint}}",
            "programs.kernel_locks.mechanism: tracepoint does not do for mode all: no tracepoint reports "
            "every acquisition",
        ),
        (
            f"programs: {{futex: {OFF}, offcpu: {OFF}, kernel_locks: {OFF}}}",
            f"programs: {{futex: {OFF}, offcpu: {{enabl ... enables no program; one must run",
        ),
        ("filter: {comms: x}", "filter.comms: x is not a list of names or shell patterns"),
        ("filter: {units: [1]}", "filter.units[0]: 1 is not a string: a name, or a shell pattern"),
        ('filter: {units: [""]}', 'filter.units[0]: "" is not a string: a name, or a shell pattern'),
        (
            "filter: {comms: [ok, a_name_of_16_byte]}",
            f"filter.comms[1]: a_name_of_16_byte {COMM}",
        ),
        ("filter: {pids: [0]}", "filter.pids[0]: 0 is not a whole number from 1 to 4194304"),
        ("filter: {pids: [010]}", "filter.pids[0]: 010 is not a whole number from 1 to 4194304"),
        ("filter: {pids: ['1']}", "filter.pids[0]: '1' is not a whole number from 1 to 4194304"),
        (
            "filter: {min_block: 5}",
            "filter.min_block: 5 is not 0 or a duration up to 24h",
        ),
        (
            "filter: {max_block: 0}",
            "filter.max_block: 0 is not a duration from 1us to 24h, or none",
        ),
        (
            "filter: {min_block: 2ms, max_block: 2000us}",
            "filter.max_block: 2000us is not longer than min_block, so nothing could be counted",
        ),
        *(
            (f"budget: {{cpu: {wrong}}}", f"budget.cpu: {wrong} is not {SHARE}")
            for wrong in ("2", "0.02", "0%", "0.001%", "101%", "-1%", "2 %", "2.%", "off", "1e1%", "[2%]")
        ),
        ("windows: []", f"windows: [] {WINDOWS}"),
        ("windows: 1m", f"windows: 1m {WINDOWS}"),
        ("windows: [1m, 60s]", f"windows: [1m, 60s] {WINDOWS}"),
        ("windows: [1m, 2m, 3m, 4m, 5m]", f"windows: [1m, 2m, 3m, 4m, 5m] {WINDOWS}"),
        ("windows: [9s]", "windows[0]: 9s is not a duration from 10s to 24h, such as 1m or 1h30m"),
        ("histogram: {buckets_us: []}", f"histogram.buckets_us: [] {BUCKETS}"),
        ("histogram: {buckets_us: [4, 1]}", f"histogram.buckets_us: [4, 1] {BUCKETS}"),
        ("histogram: {buckets_us: [4, 4]}", f"histogram.buckets_us: [4, 4] {BUCKETS}"),
        (
            "histogram: {buckets_us: [1, 3]}",
            "histogram.buckets_us[1]: 3 is not a power of two from 1 to 67108864",
        ),
        ("series: {max: 999}", "series.max: 999 is not a whole number from 1000 to 1000000"),
        (
            f"series: {{max: {'9' * 50}}}",
            f"series.max: {'9' * 40} ... is not a whole number from 1000 to 1000000",
        ),
        (
            f"{{histogram: {{buckets_us: {FINE}}}, series: {{idle: 1m, max: 1000}}}}",
            f"series.max: 1000 {NO_ROOM}; rule: 1178 or more with these programs, buckets and windows",
        ),
        ("maps: {stacks: 32}", "maps.stacks: 32 is not a power of two from 64 to 1048576"),
        ("maps: {entries: 100}", "maps.entries: 100 is not a power of two from 64 to 1048576, or auto"),
        ("web: {listen: []}", "web.listen: [] is not a list of different addresses, at least one"),
        (
            'web: {listen: [":80", ":80"]}',
            'web.listen: [":80", ":80"] is not a list of different addresses, at least one',
        ),
        ("web: {listen: [9776]}", f"web.listen[0]: 9776 {ADDRESS}"),
        ("web: {listen: ['::1:80']}", f"web.listen[0]: '::1:80' {ADDRESS}"),
        (
            "web: {config_file: web.yml}",
            "web.config_file: web.yml is not a path that starts with /, or null",
        ),
        ("log: {level: loud}", "log.level: loud is not one of debug, info, warning, error"),
        ("perod: 50ms", 'perod: unknown key; did you mean "period"?'),
        ("series: {maxx: 1}", 'series.maxx: unknown key; did you mean "max"?'),
        (
            "buckets_us: [1]",
            'buckets_us: unknown key; did you mean "buckets_us" in the section histogram?',
        ),
        (
            "filter.pids: [1]",
            'filter.pids: unknown key; did you mean "pids" in the section filter?',
        ),
        (
            "series: {period: 1s}",
            'series.period: unknown key; did you mean "period" at the top level?',
        ),
        ("log: {zzz: 1}", "log.zzz: unknown key; log has level"),
        ("1: 2", f"1: unknown key; the top level has {SECTIONS}"),
        ("log: {[a]: 1}", "log.[a]: unknown key; log has level"),
        ("<<: {period: 1s}", f"<<: unknown key; the top level has {SECTIONS}"),
        ("[period]", f"[period] is not a section with the keys {SECTIONS}"),
    ],
)  # fmt: skip
def test_one_problem(text: str, message: str) -> None:
    assert problems(text) == [f"lockd.yaml:1: {message}"]


def test_all_problems_at_once_each_with_its_line() -> None:
    text = """\
perod: 50ms
period: 5

filter:
  comms:
    - fine
    - 5
  pids: [x, 1, y]
  min_block: 10ms
  min_block: 3
  max_block: 5ms
windows: [60s, 1m]
log:
  level:
    - info
    - debug
"""
    assert [line.split(" is ")[0].split(";")[0] for line in problems(text)] == [
        "lockd.yaml:1: perod: unknown key",
        "lockd.yaml:2: period: 5",
        "lockd.yaml:7: filter.comms[1]: 5",
        "lockd.yaml:8: filter.pids[0]: x",
        "lockd.yaml:8: filter.pids[2]: y",
        "lockd.yaml:10: filter.min_block: given twice, first on line 9",
        "lockd.yaml:11: filter.max_block: 5ms",
        "lockd.yaml:12: windows: [60s, 1m]",
        "lockd.yaml:15: log.level: - info ...",
    ]


def test_the_least_series_depend_on_what_has_a_series_called_other() -> None:
    """A configuration without room for any name would be of no use, and look well in every alert."""
    assert parse("series: {max: 1000}").series.max == 1000
    every = "programs: {futex: {mode: calls}, kernel_locks: {mode: all}}"
    assert parse(f"series: {{max: 1000}}\n{every}").series.max == 1000
    one = f"programs: {{offcpu: {OFF}, kernel_locks: {OFF}}}\nhistogram: {{buckets_us: {FINE}}}"
    assert parse(f"series: {{max: 1000}}\n{one}").series.max == 1000
    most = f"{every}\nhistogram: {{buckets_us: {FINE}}}\nwindows: [1m, 2m, 3m, 4m]"
    assert parse(f"series: {{max: 1370}}\n{most}").series.max == 1370
    (problem,) = problems(f"series:\n  max: 1369\n{most}")
    assert problem.startswith(f"lockd.yaml:2: series.max: 1369 {NO_ROOM}; rule: 1370 or more")


# --- Bad files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"period: 'x\n", ":2:1: not valid YAML: while scanning a quoted scalar, found unexpected"),
        (b"a:\n\tb: 1\n", ":2:1: not valid YAML: while scanning for the next token, found charact"),
        (b"period: *x\n", ":1:9: not valid YAML: found undefined alias 'x'"),
        (b"--- 1\n--- 2\n", ":2:1: not valid YAML: expected a single document in the stream"),
        (b'period: "\\UFFFFFFFF"\n', ": not valid YAML: "),
        (b"period: 1s\nlog: \x07\n", ":2: not valid YAML: special characters are not allowed"),
        (b"period: 1s\n# \xff\n", ":2: not text in UTF-8"),
        (b"[" * 100_000, ": not valid YAML for lockd: nested too deeply"),
        (b"#" * 1_048_577, ": larger than 1 MiB, so not a configuration of lockd"),
    ],
)
def test_not_yaml(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lockd.yaml"
    file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}{message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["*", "*.service", "*x", "%x", "@x", "`x", "&.x", "!x!y", "[:9776]", "[*]"])
def test_a_value_without_the_quotes_that_it_needs(value: str) -> None:
    (problem,) = problems(f"period: {value}\n")
    assert problem.endswith(f"; rule: a value that begins with {value.strip('[]')[0]} is in quotes")


@pytest.mark.parametrize("text", ["a: b: c", "a: b : c", "a: [b", "a: 'x", "a: ]", "a:\n\tb: 1"])
def test_what_no_quotes_would_mend(text: str) -> None:
    (problem,) = problems(text)
    assert "not valid YAML" in problem
    assert "quotes" not in problem


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read this configuration: No such file"):
        load(tmp_path / "none.yaml")


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read this configuration: Is a directory"):
        load(tmp_path)


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "lockd.yaml"
    file.touch()
    os.truncate(file, (1 << 20) + 1)
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load(file)


def test_what_has_no_end_or_waits_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="it is no regular file"):
            load(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a child of another user")
def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    file = tmp_path / "lockd.yaml"
    file.write_text("period: 1s\n")
    file.chmod(0o600)
    os.chmod(tmp_path, 0o755)
    child = os.fork()
    if child == 0:  # the child becomes the user nobody, since root may read everything
        os.setresuid(65534, 65534, 65534)
        try:
            load(file)
        except ConfigError as error:
            os._exit(0 if "Permission denied" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@given(st.text())
def test_any_text_gives_a_config_or_its_problems(text: str) -> None:
    try:
        assert isinstance(parse(text), Config)
    except ConfigError as error:
        assert str(error).startswith("lockd.yaml")


KEYS = st.sampled_from([name.rpartition(".")[2] for name, _ in all_keys(Config)])
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
)


@given(st.dictionaries(KEYS, TREES))
def test_any_tree_gives_a_config_or_problems_with_lines(tree: object) -> None:
    try:
        assert isinstance(parse(yaml.safe_dump(tree)), Config)
    except ConfigError as error:
        for line in str(error).splitlines():
            assert line.startswith("lockd.yaml:")


# --- Durations and addresses ----------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(list(UNITS_NS)), st.integers(0, 10**6), min_size=1))
def test_durations_add_up(parts: dict[str, int]) -> None:
    text = "".join(f"{parts[unit]}{unit}" for unit in UNITS_NS if unit in parts)
    assert parse_duration(text) == sum(count * UNITS_NS[unit] for unit, count in parts.items())


@pytest.mark.parametrize("text", ["", "5", "1m1h", "1h1h", "m", "1 m", "1M", "1ns", "٣s", "0x1s"])
def test_not_durations(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9776", ("127.0.0.1", 9776)),
        ("localhost:1", ("localhost", 1)),
        (":9776", ("", 9776)),
        ("[::]:65535", ("::", 65535)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "9776", "host", "host:", "host:65536", "1.2.3:80", "1.2.3.256:80", "[1.2.3.4]:80", "[]:80",
     "::1:80", "[::1]", "http://host:80", "host:80/", "host:-1", "ho st:80"],
)  # fmt: skip
def test_not_addresses(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)
