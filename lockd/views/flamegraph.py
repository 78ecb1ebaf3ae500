"""Flame graphs: one SVG or HTML file that needs nothing else, with zoom and search."""

from __future__ import annotations

import base64
import hashlib
import html
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockd.views.profile import Profile, Value, kind_of

WIDTH, MARGIN = 1200, 10
"""In pixels, until the script fits it to the window."""
ROW, TOP = 18, 98
LETTER, PADDING = 6.63, 3
"""Width of a letter; of what is left free beside a name."""
NARROWEST = 1 / 4000
"""Of the whole. Functions with less are put together with others beside them."""
SHADES = 6

SCRIPT = Path(__file__).with_suffix(".js").read_text()
HUES = {"process": (100, 30, 76), "user": (32, 92, 68), "kernel": (205, 70, 72), "mark": (0, 0, 84)}
"""Hue, saturation and lightness, by the kind of a frame."""
LEGEND = (("process", "process"), ("user", "user space"), ("kernel", "kernel"), ("mark", "no function"))


def _style() -> str:
    shades = [
        f".{kind}{shade} rect {{ fill: hsl({hue - 3 * shade}, {saturation}%, {lightness + 2 * shade}%) }}"
        for kind, (hue, saturation, lightness) in HUES.items()
        for shade in range(SHADES)
    ]
    return "\n".join(
        [
            "body { margin: 0 }",
            "svg.flamegraph { background: #fff; display: block }",
            '.flamegraph text { font: 11px "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #111 }',
            ".flamegraph .heading { font: bold 16px sans-serif }",
            ".flamegraph .about { font: 12px sans-serif; fill: #444 }",
            "#frames g { cursor: pointer }",
            "#frames rect { stroke: #fff; stroke-width: .5 }",
            "#frames text { pointer-events: none }",
            "#frames g:hover rect { stroke: #000; stroke-width: 1 }",
            "#frames g.above { opacity: .55 }",
            "#frames g.match rect { fill: #e04bd6 }",
            "#reset { cursor: pointer; visibility: hidden; fill: #0645ad; text-decoration: underline }",
            "#found, #reset { text-anchor: end }",
            ".flamegraph input { box-sizing: border-box; width: 100%; height: 24px; font: 12px sans-serif }",
            *shades,
        ]
    )


STYLE = _style()


def content_security_policy() -> str:
    """What a page with a graph may do: its own script and style, whatever the names in it are."""
    script, style = (
        base64.b64encode(hashlib.sha256(f"\n{text}\n".encode()).digest()).decode() for text in (SCRIPT, STYLE)
    )
    return f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'"


@dataclass
class _Node:
    """A function where it was called from the same stack."""

    name: str
    kind: str
    value: int = 0
    children: dict[tuple[str, str], _Node] = field(default_factory=dict)


@dataclass(frozen=True)
class _Box:
    node: _Node
    depth: int
    start: int
    """Sum of the values to its left."""


def svg(profile: Profile) -> str:
    """By the first value of `profile`; the outermost frames, which are the processes, on top."""
    boxes = list(_boxes(_tree(profile)))
    total, unit = boxes[0].node.value, profile.values[0]
    height = TOP + (max(box.depth for box in boxes) + 1) * ROW + MARGIN
    scale = (WIDTH - 2 * MARGIN) / total if total else 0.0
    drawn = "\n".join(_drawn(box, scale, total, unit) for box in boxes) if total else ""
    empty = f'<text x="{MARGIN}" y="{TOP + 13}">Nothing was seen.</text>' if not total else ""
    return f"""<svg class="flamegraph" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}">
<style><![CDATA[
{STYLE}
]]></style>
{_head(profile, total)}
<g id="frames">
{drawn}
</g>{empty}
<script><![CDATA[
{SCRIPT}
]]></script>
</svg>
"""


def page(profile: Profile) -> str:
    """The same as HTML."""
    title = html.escape(profile.title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
{svg(profile)}</body>
</html>
"""


def amount(number: int, value: Value) -> str:
    """A number with its unit, as people read it."""
    if value.unit == "count":
        return f"{number:,}"
    us = number / 1000 if value.unit == "nanoseconds" else float(number)
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if us >= scale:
            return f"{us / scale:,.3f} {unit}"
    return f"{us:,.3f} us".replace(".000", "")


def _tree(profile: Profile) -> _Node:
    """Samples with the same functions put together, by process."""
    root = _Node("all", "mark")
    for sample in profile.sorted():
        names = [("process", sample.comm), *((kind_of(frame), frame) for frame in sample.frames)]
        value = sample.values[0]
        node = root
        node.value += value
        for kind, name in names:
            node = node.children.setdefault((name, kind), _Node(name, kind))
            node.value += value
    return root


def _boxes(root: _Node) -> Iterator[_Box]:
    """Callers before what they call, beside each other by name; nothing has no width."""
    todo = [_Box(root, 0, 0)]
    while todo:
        box = todo.pop()
        yield box
        inside, start = [], box.start
        for node in _wide_enough(box.node, root.value * NARROWEST):
            inside.append(_Box(node, box.depth + 1, start))
            start += node.value
        todo += reversed(inside)


def _wide_enough(node: _Node, least: float) -> list[_Node]:
    """What a function calls, by name; what is too narrow to be seen as one that stands for all of it."""
    shown = [child for _, child in sorted(node.children.items()) if child.value >= max(least, 1)]
    narrow = [child for child in node.children.values() if 0 < child.value < max(least, 1)]
    if narrow:
        words = f"[{len(narrow)} too narrow to be shown]"
        shown.append(_Node(words, "mark", sum(child.value for child in narrow)))
    return shown


def _drawn(box: _Box, scale: float, total: int, value: Value) -> str:
    node = box.node
    x, y, width = MARGIN + box.start * scale, TOP + box.depth * ROW, node.value * scale
    letters = int((width - 2 * PADDING) / LETTER)
    name = node.name if len(node.name) <= letters else node.name[: letters - 1] + "…" if letters > 2 else ""
    shade = zlib.crc32(node.name.encode("utf-8", "replace")) % SHADES
    about = f"{node.name}\n{amount(node.value, value)}, {node.value / total:.2%}"
    return (
        f'<g class="{node.kind}{shade}"><title>{html.escape(about)}</title>'
        f'<rect x="{x:.3f}" y="{y}" width="{width:.3f}" height="{ROW - 1}"/>'
        f'<text x="{x + PADDING:.3f}" y="{y + 13}">{html.escape(name)}</text></g>'
    )


def _head(profile: Profile, total: int) -> str:
    """What it is about, a line about the function under the pointer, what there is to press."""
    value = profile.values[0]
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(profile.began))
    about = [f"{value.name.removesuffix('_us')}: {amount(total, value)} in all"]
    about += [f"{profile.seconds:.1f} s from {when}"] if profile.seconds else [when]
    legend, x = [], MARGIN
    for kind, words in LEGEND:
        legend.append(
            f'<g class="{kind}1"><rect x="{x}" y="56" width="10" height="10"/>'
            f'<text x="{x + 14}" y="65">{words}</text></g>'
        )
        x += 40 + int(len(words) * LETTER)
    right = f'data-right="{MARGIN}" x="{WIDTH - MARGIN}"'
    return f"""<text class="heading" x="{MARGIN}" y="22">{html.escape(profile.title)}</text>
<text class="about" x="{MARGIN}" y="42">{html.escape(" · ".join(about))}</text>
{"".join(legend)}
<foreignObject data-right="{MARGIN + 220}" x="{WIDTH - MARGIN - 220}" y="6" width="220" height="24">
<input xmlns="http://www.w3.org/1999/xhtml" type="search" placeholder="search: a regular expression"/>
</foreignObject>
<text id="reset" {right} y="65">show all</text>
<text id="found" {right} y="48"></text>
<text id="told" x="{MARGIN}" y="{TOP - 8}"> </text>"""
