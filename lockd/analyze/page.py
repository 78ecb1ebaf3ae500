"""A page that holds everything: pictures and tables, without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from lockd.analyze.text import Table

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; color: #222; }
body { max-width: 1200px; margin: 2em auto; padding: 0 1em; }
h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { text-align: right; padding: 2px 10px; white-space: nowrap; border-bottom: 1px solid #ddd; }
th:last-child, td:last-child { text-align: left; white-space: normal; font-family: monospace; }
th { font-weight: 600; }
svg { width: 100%; height: auto; }
"""


def page(title: str, sentences: list[str], picture: str, tables: list[Table]) -> Iterator[str]:
    """The lines of an HTML file; `picture` is SVG."""
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f"<title>{escape(title)}</title>\n"
    yield f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
    yield from (f"<p>{escape(sentence)}</p>\n" for sentence in sentences)
    yield picture
    for table in tables:
        yield f"<h2>{escape(table.title)}</h2>\n<table>\n<tr>{_cells('th', table.head)}</tr>\n"
        yield from (f"<tr>{_cells('td', row)}</tr>\n" for row in table.rows)
        yield "</table>\n"
    yield "</body>\n</html>\n"


def _cells(tag: str, cells: tuple[str, ...]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
