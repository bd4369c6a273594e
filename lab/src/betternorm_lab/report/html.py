"""Results as one static HTML page: text, tables, and figures as inline SVG. It needs no other file and no network."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from betternorm.display.tables import is_number, shown
from betternorm_lab.report import figures, markdown, provenance
from betternorm_lab.results import Result
from betternorm_lab.store import make_folder, write_text

STYLE = """body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
caption { text-align: left; font-weight: bold }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .75rem; text-align: left; vertical-align: top }
.number { text-align: right } svg { max-width: 100%; height: auto }"""


def write(results: Sequence[Result], path: str | os.PathLike[str], title: str = "Results") -> Path:
    """Write the page to ``path``."""
    make_folder(Path(path).parent)
    return write_text(Path(path), page(results, title))


def page(results: Sequence[Result], title: str) -> str:
    """The page as text."""
    named = markdown.named(results)
    contents = "".join(
        f'<li><a href="#{escape(name)}">{escape(one.title)}</a> {markdown.tally(one.verdicts)}</li>'
        for name, one in named.items()
    )
    body = "\n".join(_section(name, result) for name, result in named.items())
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style></head>\n'
        f"<body><main><h1>{escape(title)}</h1>\n<ul>{contents if len(named) > 1 else ''}</ul>\n{body}\n"
        "</main></body></html>\n"
    )


def _section(name: str, result: Result) -> str:
    parts = [f'<h2 id="{escape(name)}">{escape(result.title)}</h2>', f"<p><em>{markdown.subtitle(result)}</em></p>"]
    parts += [f"<p>{_prose(paragraph)}</p>" for paragraph in result.notes.split("\n\n") if paragraph.strip()]
    claims = [[one.outcome.value, one.claim, one.evidence] for one in result.verdicts]
    parts += [_table("Claims", ["outcome", "claim", "evidence"], claims)] if claims else []
    parts += [f"<figure>{_inline(figures.svg(figure), figure.title)}</figure>" for figure in result.figures]
    parts += [_table(one.title, one.headers, one.rows) for one in result.tables]
    parts.append(f"<p>Command: <code>{escape(result.command)}</code></p>")
    shared = provenance.shared_settings(result.rows)
    parts += [_table("Common to all trials", ["setting", "value"], list(shared.items()))] if shared else []
    return "\n".join(parts)


def _inline(svg: str, title: str) -> str:
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    body = [[shown(value) for value in row] for row in rows]
    right = [bool(body) and all(is_number(row[column]) for row in body) for column in range(len(headers))]

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = zip(cells, right, strict=True)
        return "".join(f"<{tag}{' class=number' * number}>{_prose(cell)}</{tag}>" for cell, number in marked)

    lines = "\n".join(f"<tr>{line('td', row)}</tr>" for row in body)
    head = f"<caption>{escape(title)}</caption><thead><tr>{line('th', headers)}</tr></thead>"
    return f"<table>{head}<tbody>\n{lines}\n</tbody></table>"


def _prose(text: str) -> str:
    """Text with `code` and *emphasis*, as in Markdown."""
    marked = re.sub(r"(`+)([^`]+)\1", r"<code>\2</code>", escape(text))
    return re.sub(r"(?<!\w)\*([^*\s][^*]*)\*(?!\w)", r"<em>\1</em>", marked)
