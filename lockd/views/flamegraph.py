"""Flame graphs: a single SVG or HTML file with zoom and search, which loads no other file."""

from __future__ import annotations

import base64
import hashlib
import html
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockd.views.profile import Profile, Value, frame_kind

WIDTH, MARGIN = 1200, 10
"""Width in pixels of the picture, before the script fits it to the window, and of the margin on each side."""
ROW, TOP = 18, 98
"""Height in pixels of a row of frames, and of everything above the frames."""
LETTER, PADDING = 6.63, 3
"""Width in pixels of a letter, and of the space on each side of a name."""
NARROWEST = 1 / 4000
"""Smallest share of the total for which a frame is drawn. Narrower ones of one caller are drawn as one."""
SHADES = 6
"""Shades of the colour of each kind of frame."""

SCRIPT = Path(__file__).with_suffix(".js").read_text()
HUES = {"process": (100, 30, 76), "user": (32, 92, 68), "kernel": (205, 70, 72), "mark": (0, 0, 84)}
"""Hue, saturation and lightness by kind of frame."""
LEGEND = (("process", "process"), ("user", "user space"), ("kernel", "kernel"), ("mark", "no function"))
"""Kinds of frames and their names in the picture."""


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
            "#matches, #reset { text-anchor: end }",
            ".flamegraph input { box-sizing: border-box; width: 100%; height: 24px; font: 12px sans-serif }",
            *shades,
        ]
    )


STYLE = _style()


def content_security_policy() -> str:
    """The Content-Security-Policy of page(): it allows only the page's own script and style."""
    script, style = (
        base64.b64encode(hashlib.sha256(f"\n{text}\n".encode()).digest()).decode() for text in (SCRIPT, STYLE)
    )
    return f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'"


@dataclass
class _Node:
    """A function called from one stack of callers."""

    name: str
    kind: str
    value: int = 0
    """Sum of the samples in this function and the functions that it called."""
    children: dict[tuple[str, str], _Node] = field(default_factory=dict)


@dataclass(frozen=True)
class _Box:
    """The rectangle of a node."""

    node: _Node
    depth: int
    """The number of rows above the box."""
    start: int
    """The sum of the values to the left of the box."""


def svg(profile: Profile) -> str:
    """A flame graph of the first value of `profile`, as SVG. Processes are on top, their frames below."""
    boxes = list(_boxes(_tree(profile)))
    total, unit = boxes[0].node.value, profile.values[0]
    height = TOP + (max(box.depth for box in boxes) + 1) * ROW + MARGIN
    scale = (WIDTH - 2 * MARGIN) / total if total else 0.0
    drawn = "\n".join(_drawn(box, scale, total, unit) for box in boxes) if total else ""
    empty = f'<text x="{MARGIN}" y="{TOP + 13}">Nothing was measured.</text>' if not total else ""
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
    """A page of HTML with the flame graph of a profile."""
    title = html.escape(profile.title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
{svg(profile)}</body>
</html>
"""


def amount(number: int, value: Value) -> str:
    """A number with a unit that suits its size, for instance `1.500 ms`."""
    if value.unit == "count":
        return f"{number:,}"
    us = number / 1000 if value.unit == "nanoseconds" else float(number)
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if us >= scale:
            return f"{us / scale:,.3f} {unit}"
    return f"{us:,.3f} us".replace(".000", "")


def _tree(profile: Profile) -> _Node:
    """The tree of all stacks: below the root a node for each comm, below that the functions."""
    root = _Node("all", "mark")
    for sample in profile.sorted():
        names = [("process", sample.comm), *((frame_kind(frame), frame) for frame in sample.frames)]
        value = sample.values[0]
        node = root
        node.value += value
        for kind, name in names:
            node = node.children.setdefault((name, kind), _Node(name, kind))
            node.value += value
    return root


def _boxes(root: _Node) -> Iterator[_Box]:
    """A box for each node, callers before the functions they call. Boxes in a row are sorted by name."""
    todo = [_Box(root, 0, 0)]
    while todo:
        box = todo.pop()
        yield box
        children, start = [], box.start
        for node in _visible_children(box.node, root.value * NARROWEST):
            children.append(_Box(node, box.depth + 1, start))
            start += node.value
        todo += reversed(children)


def _visible_children(node: _Node, least: float) -> list[_Node]:
    """The children of a node sorted by name. One node at the end stands for all with less than `least`."""
    visible = [child for _, child in sorted(node.children.items()) if child.value >= max(least, 1)]
    narrow = [child for child in node.children.values() if 0 < child.value < max(least, 1)]
    if narrow:
        name = f"[{len(narrow)} too narrow to be shown]"
        visible.append(_Node(name, "mark", sum(child.value for child in narrow)))
    return visible


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
    """Title, total, legend, search field and button, and the line for the frame under the pointer."""
    value = profile.values[0]
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(profile.began))
    about = [f"{value.name.removesuffix('_us')}: {amount(total, value)} in all"]
    about += [f"{profile.seconds:.1f} s from {when}"] if profile.seconds else [when]
    legend, x = [], MARGIN
    for kind, name in LEGEND:
        legend.append(
            f'<g class="{kind}1"><rect x="{x}" y="56" width="10" height="10"/>'
            f'<text x="{x + 14}" y="65">{name}</text></g>'
        )
        x += 40 + int(len(name) * LETTER)
    right = f'data-right="{MARGIN}" x="{WIDTH - MARGIN}"'
    return f"""<text class="heading" x="{MARGIN}" y="22">{html.escape(profile.title)}</text>
<text class="about" x="{MARGIN}" y="42">{html.escape(" · ".join(about))}</text>
{"".join(legend)}
<foreignObject data-right="{MARGIN + 220}" x="{WIDTH - MARGIN - 220}" y="6" width="220" height="24">
<input xmlns="http://www.w3.org/1999/xhtml" type="search" placeholder="search (regular expression)"/>
</foreignObject>
<text id="reset" {right} y="65">reset zoom</text>
<text id="matches" {right} y="48"></text>
<text id="details" x="{MARGIN}" y="{TOP - 8}"> </text>"""
