"""Tests of each one-shot tool: its help, its page in docs/trace, and the examples, which its parser takes."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from lockd import cli
from lockd.errors import LockdError, UsageError
from lockd.trace.commands import TOOLS
from lockd.trace.core import output
from lockd.trace.core.call_stacks import CallStacks
from lockd.trace.core.histogram import Histogram
from lockd.trace.futex import futex
from lockd.trace.klock import klock
from lockd.trace.mutex import formats
from lockd.trace.mutex.times import Key, Measurement
from lockd.trace.probes import pattern_options, stackcount
from lockd.trace.probes.patterns import Place, Probes, parse
from lockd.views.profile import Profile, Sample, Value

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs/trace"
OVERVIEW = DOCS / "README.md"
PAGES = {path.stem: path.read_text() for path in sorted(DOCS.glob("*.md")) if path.stem in TOOLS}
SECTIONS = ("Options", "Output", "Example", "Differences", "Limits")
SHELL = re.compile(r"\||\d?>.*|&|;")
"""Words that end a command on a line of a shell."""


def parser_of(tool: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    TOOLS[tool].add_options(parser)
    return parser


def options_of(tool: str) -> list[argparse.Action]:
    return [action for action in parser_of(tool)._actions if action.dest != "help"]


def examples_of_help(tool: str) -> list[str]:
    """Return the examples in a help text. Two or more blanks divide an example from what is said about it."""
    lines = getattr(TOOLS[tool], "EPILOG", "").splitlines()
    found = [line.strip() for line in lines if line.startswith("  ") and " trace " in line]
    return [re.split(r"\s{2,}", line)[0] for line in found]


def examples_of_page(text: str) -> Iterator[str]:
    """Yield the commands in blocks: lines that begin with a prompt. A backslash continues a line."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if found := re.match(r"[$#] (?:sudo )?(lockd trace .*)", line):
                yield found[1]


ALL_EXAMPLES = sorted(
    {("help", example) for tool in TOOLS for example in examples_of_help(tool)}
    | {(name, example) for name, text in PAGES.items() for example in examples_of_page(text)}
    | {("overview", example) for example in examples_of_page(OVERVIEW.read_text())}
    | {("README", example) for example in examples_of_page((ROOT / "README.md").read_text())}
)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_help_says_what_each_option_does(tool: str) -> None:
    assert TOOLS[tool].HELP[0].isupper()
    assert not TOOLS[tool].HELP.endswith(".")
    for action in options_of(tool):
        assert action.help, action.option_strings or action.dest
        assert action.help != argparse.SUPPRESS


def test_the_help_says_what_latencies_are_grouped_by() -> None:
    (by,) = (action.help for action in options_of("latency") if action.dest == "by")
    assert by and by.endswith("(default: ret for system calls, none for tracepoints)")


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("", 10.0), ("-o x", 10.0), ("--flamegraph x.svg", None), ("--flamegraph x.svg --format csv", 10.0),
     ("--callers", None), ("--callers 5", 5.0)],
)  # fmt: skip
def test_records_end_by_themselves(
    words: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def session(_title: str, _settings: object, duration: float | None, *_: object, **__: object) -> NoReturn:
        raise Lasts(duration)

    monkeypatch.setattr(klock, "Session", session)
    with pytest.raises(Lasts) as raised:
        klock.run(parser_of("klock").parse_args(words.split()))
    assert raised.value.args == (seconds,)


@pytest.mark.parametrize("option", ["--mode all", "--hold"])
def test_a_mechanism_that_sees_no_holds_is_refused_where_holds_are_asked_for(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(klock, "Session")  # nothing is attached
    with pytest.raises(UsageError, match=f"^{option}: no tracepoint reports holds; rule: --mechanism fentry"):
        klock.run(parser_of("klock").parse_args(f"{option} --mechanism tracepoint".split()))


class Lasts(Exception):
    """Raised with the duration of a trace: a number of seconds, or None for no limit."""


@pytest.mark.parametrize("tool", TOOLS)
def test_the_help_has_examples(tool: str) -> None:
    examples = examples_of_help(tool)
    assert len(examples) >= 2
    assert all(example.startswith(f"lockd trace {tool}") for example in examples)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_page_is_complete(tool: str) -> None:
    text = PAGES[tool]
    assert text.startswith(f"# lockd trace {tool}\n")
    assert re.search(rf"^```\w*\nlockd trace {tool}\b", text, re.MULTILINE), "it has no synopsis"
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    for section in SECTIONS:
        assert any(heading.startswith(section) for heading in headings), section
    assert list(examples_of_page(text)), "it has no example"


@pytest.mark.parametrize("tool", TOOLS)
def test_the_page_names_every_option(tool: str) -> None:
    for action in options_of(tool):
        names = action.option_strings or [action.metavar or action.dest]
        known = [
            name for name in names if re.search(rf"(?<![\w-]){re.escape(str(name))}(?![\w-])", PAGES[tool])
        ]
        assert known, names


@pytest.mark.parametrize("tool", TOOLS)
def test_the_page_names_no_option_that_is_not(tool: str) -> None:
    """An option may be that of any tool, because pages speak of the options of other tools."""
    known = {name for tool in TOOLS for action in options_of(tool) for name in action.option_strings}
    own = PAGES[tool].partition("## Differences")[0]
    synopsis_and_options = re.sub(r"^```.*?^```$", "", own, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(--[a-z][a-z-]*)", synopsis_and_options))
    assert named <= known


@pytest.mark.parametrize("tool", TOOLS)
def test_the_overview_links_to_the_page(tool: str) -> None:
    assert f"({tool}.md)" in OVERVIEW.read_text()


@pytest.mark.parametrize("tool", TOOLS)
def test_the_overview_tells_its_formats(tool: str) -> None:
    formats = OVERVIEW.read_text().partition("## Formats")[2]
    head, _, *lines = [line[1:-1].split("|") for line in formats.splitlines() if line.startswith("|")]
    row = next((line for line in lines if line[0].strip() == tool), None)
    actions = {action.option_strings[-1]: action for action in options_of(tool) if action.option_strings}
    if "--format" not in actions:
        assert row is None
        return
    assert row is not None, "it is not in the table of formats"
    cells = {name.strip(): cell.strip() for name, cell in zip(head[1:], row[1:], strict=False)}
    others = [one.strip() for one in cells.pop("others", "").split(",") if one.strip()]
    told = {name for name, cell in cells.items() if cell and name != "flame graph"}
    told |= {one.strip("*") for one in others}
    assert told == set(actions["--format"].choices or ())
    default = [name for name, cell in cells.items() if cell == "**yes**"]
    default += [one.strip("*") for one in others if one.startswith("**")]
    assert default == [actions["--format"].default]
    assert (cells["flame graph"] == "yes") == ("--flamegraph" in actions)


@pytest.mark.parametrize(("where", "example"), ALL_EXAMPLES)
def test_every_example_is_a_command(where: str, example: str) -> None:
    line = shlex.split(re.sub(r"\$\(.*?\)", "1234", example), comments=True)  # such as $(pgrep -x shop)
    words = list(itertools.takewhile(lambda word: not SHELL.fullmatch(word), line))
    args = cli._parser(words[1:]).parse_args(words[1:])
    assert args.tool in TOOLS


def test_links_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (DOCS / target).exists(), f"{page.name}: {target}"


def outputs(**options: object) -> argparse.Namespace:
    return argparse.Namespace(**{"output": None, "flamegraph": None, "format": "csv", **options})


def test_outputs_are_tried_at_the_start_and_nothing_is_left(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("of before")
    output.check_options(outputs(output=tmp_path / "new", flamegraph=tmp_path / "graph.svg"))
    output.check_options(outputs(output=kept))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "of before"


def test_a_link_to_a_file_that_is_not_there_yet_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link, target = tmp_path / "link", tmp_path / "disk" / "new"
    link.symlink_to("disk/new")
    output.check_options(outputs(output=link))
    assert link.is_symlink() and not target.exists()
    output.write_text(link, ["result"])
    assert link.is_symlink() and target.read_text() == "result"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"output": Path("/nonexistent/x")}, "/nonexistent/x: cannot be written: No such file or directory"),
        ({"output": Path("/")}, "/: cannot be written: Is a directory"),
        ({"output": Path("/dev/null/x")}, "/dev/null/x: cannot be written: Not a directory"),
        ({"output": Path("/tmp", "x" * 256)}, "x: cannot be written: File name too long"),
        ({"flamegraph": Path("x.png")}, "--flamegraph x.png: rule: a name that ends in .svg or .html"),
        ({"flamegraph": Path("/tmp/x.svg"), "output": Path("/tmp/x.svg")}, "--output is the same file"),
    ],
)
def test_outputs_that_cannot_be(options: dict[str, Path], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        output.check_options(outputs(**options))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("futex --hist x -o x", "two are the same file"),
        ("futex --holders x --hist x", "two are the same file"),
        ("klock --hold --mode contention", "--mode contention measures no holds; rule: --mode all"),
        ("klock -d 5 10", "the duration is given twice"),
    ],
)
def test_options_that_contradict(
    command: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tool, *words = command.split()
    with pytest.raises(UsageError, match=re.escape(says)):
        TOOLS[tool].run(parser_of(tool).parse_args(words))


@pytest.mark.parametrize("tool", ["signals", "stacksnoop t:sched:sched_switch"])
def test_a_process_that_is_not_there_costs_no_results_of_before(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = Probes(parse("t:sched:sched_switch"), (Place("", ""),))
    monkeypatch.setattr(pattern_options, "resolve_probes", lambda *_: probes)
    kept = tmp_path / "kept"
    kept.write_text("of before")
    name, *words = tool.split()
    with subprocess.Popen(["true"]) as child:
        child.wait()
    with pytest.raises(UsageError, match=f"process {child.pid}: No such process"):
        TOOLS[name].run(parser_of(name).parse_args([*words, "-p", str(child.pid), "-o", str(kept)]))
    assert kept.read_text() == "of before"


COUNTS = Profile(
    "", (Value("count", "count"),), [Sample("sh", pid, pid, ("main", "read"), (pid,)) for pid in (10, 20)]
)
"""The counts of two processes with one name."""


@pytest.mark.parametrize(
    ("options", "text", "drawn"),
    [
        ("-f", "sh;main;read 30\n", {"sh": "30"}),
        ("-f -P", "sh [10];main;read 10\nsh [20];main;read 20\n", {"sh [10]": "10", "sh [20]": "20"}),
        ("", "  read\n  main\n    30\n\n", {"sh": "30"}),
        (
            "-P",
            "  read\n  main\n    sh [10]\n    10\n\n  read\n  main\n    sh [20]\n    20\n\n",
            {"sh [10]": "10", "sh [20]": "20"},
        ),
    ],
)
def test_stackcount_by_process(options: str, text: str, drawn: dict[str, str], tmp_path: Path) -> None:
    file, graph = tmp_path / "counts", tmp_path / "graph.svg"
    words = f"stackcount c:malloc {options} -o {file} --flamegraph {graph}".split()
    args = cli._parser(["trace"]).parse_args(["trace", *words])
    args.command_line = "lockd trace stackcount"
    stackcount._check(args)
    stackcount.write(args, COUNTS)
    assert file.read_text() == text
    titles = re.findall(r"<title>(sh.*)\n(\d+), ", graph.read_text())
    assert dict(titles) == drawn


def test_json_has_the_process_beside_its_name(tmp_path: Path) -> None:
    file = tmp_path / "counts"
    words = f"stackcount c:malloc -P --format json -o {file}".split()
    args = cli._parser(["trace"]).parse_args(["trace", *words])
    stackcount.write(args, COUNTS)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["comm"], row["pid"]) for row in rows] == [("sh", 10), ("sh", 20)]


def test_a_count_of_a_process_is_of_no_single_thread() -> None:
    args = cli._parser(["trace"]).parse_args(["trace", "stackcount", "c:malloc"])
    counts = stackcount._Counts(args, CallStacks())
    key = np.dtype([("stacks", [("user", "u8"), ("kernel", "u8")])])
    value = np.dtype([("count", "u8"), ("who", [("tgid", "u4"), ("comm", "S16")])])
    counts.add({"stackcount": (np.zeros(1, key), np.array([(3, (10, b"sh"))], value))})
    (sample,) = counts._samples()
    assert (sample.comm, sample.pid, sample.tid, sample.values) == ("sh", 10, 0, (3,))


def test_times_of_a_mutex_are_of_no_single_thread() -> None:
    waits = Measurement()
    waits.times.add_value(7)
    times = {Key(10, 0x40, "orders", "worker", ("lock", "main")): waits}
    (sample,) = formats.as_profile(times, "", "wait", 0, 1).samples
    assert (sample.comm, sample.pid, sample.tid, sample.values) == ("worker", 10, 0, (7, 1))


@pytest.mark.parametrize(
    "words",
    ["--holders /dev/full --hist HIST", "--holders HIST --hist /dev/full", "-o /dev/full --hist HIST"],
)
def test_a_result_that_cannot_be_written_costs_no_other(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    trace = futex.FutexTrace([], [], {(7, 0x40): Histogram(counts={1: 2}, sum=3, max=2)}, 0.0, 1.0)
    monkeypatch.setattr(futex, "trace_calls", lambda *_: trace)
    args = cli._parser(["trace"]).parse_args(["trace", "futex", *words.replace("HIST", str(other)).split()])
    with pytest.raises(LockdError, match="/dev/full: cannot be written: No space left on device"):
        futex.run(args)
    assert other.read_text()
    assert ("pid,tid,addr" in capfd.readouterr().out) == ("-o" not in words)


def test_a_graph_that_cannot_be_written_costs_no_counts(tmp_path: Path) -> None:
    graph, file = tmp_path / "graph.svg", tmp_path / "counts"
    graph.symlink_to("/dev/full")
    words = f"stackcount c:malloc -f -o {file} --flamegraph {graph}".split()
    args = cli._parser(["trace"]).parse_args(["trace", *words])
    args.command_line = "lockd trace stackcount"
    with pytest.raises(LockdError, match="cannot be written: No space left on device"):
        stackcount.write(args, COUNTS)
    assert file.read_text() == "sh;main;read 30\n"


def test_a_time_that_cannot_be_written_costs_no_graph(tmp_path: Path) -> None:
    graph = tmp_path / "graph.svg"
    words = f"stackcount c:malloc -T -o /dev/full --flamegraph {graph}".split()
    args = cli._parser(["trace"]).parse_args(["trace", *words])
    args.command_line = "lockd trace stackcount"
    with pytest.raises(LockdError, match="/dev/full: cannot be written: No space left on device"):
        stackcount._Counts(args, CallStacks()).write(1.0)
    assert "</svg>" in graph.read_text()


def test_arguments_may_stand_among_options() -> None:
    for words in ("stackcount t:a:b -p 1 2s", "stackcount -p 1 t:a:b 2s", "stackcount t:a:b 2s -p 1"):
        args = cli._parser(["trace", *words.split()]).parse_args(["trace", *words.split()])
        assert (args.pattern, args.pids, args.duration) == ("t:a:b", (1,), 2.0)


def test_what_is_wrong_names_the_tool() -> None:
    with pytest.raises(UsageError, match="see: lockd trace stackcount --help"):
        cli._parser(["trace"]).parse_args(["trace", "stackcount", "t:a:b", "--nonsense"])
