"""A griffe extension: translates the reStructuredText in docstrings (roles, math, tables, ``Examples::``) to Markdown.

Docstrings are written for ``help()``, in the style of torch's. mkdocstrings expects Markdown.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert as to_mathml

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


class Restructured(griffe.Extension):
    """Rewrites each docstring before griffe splits it into sections."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    out: list[str] = []
    lines = text.split("\n")
    while lines:
        line = lines.pop(0)
        if re.fullmatch(r"Examples?::", line):
            code = textwrap.dedent("\n".join(_take_indented(lines))).strip()
            out += ["Examples:", textwrap.indent(f"```python\n{code}\n```", "    "), ""]
        elif line.strip().startswith(".. math::"):
            formula = " ".join([line.strip().removeprefix(".. math::"), *_take_indented(lines)])
            out += ["", to_mathml(" ".join(formula.split()), display="block"), ""]
        elif re.fullmatch(r"=+(  =+)+", line):
            out += ["", *_table(line, lines), ""]
        else:
            out.append(line)
    return _inline("\n".join(out))


def _take_indented(lines: list[str]) -> list[str]:
    taken: list[str] = []
    while lines and (not lines[0].strip() or lines[0].startswith("    ")):
        taken.append(lines.pop(0))
    return taken


def _table(rule: str, lines: list[str]) -> Iterator[str]:
    """A table between rules of equals signs; the first row is its header."""
    columns = [match.span() for match in re.finditer("=+", rule)]
    rows: list[list[str]] = []
    while lines:
        line = lines.pop(0)
        if re.fullmatch(r"=+(  =+)+", line):
            if len(rows) > 1:
                break
            continue
        ends = [start for start, _ in columns[1:]] + [None]
        rows.append([line[start:end].strip() for (start, _), end in zip(columns, ends, strict=True)])
    yield f"| {' | '.join(rows[0])} |"
    yield "|" + " --- |" * len(columns)
    for row in rows[1:]:
        yield f"| {' | '.join(row)} |"


def _inline(text: str) -> str:
    targets = {name.rpartition(".")[2]: name for name in documented_names()}

    def role(match: re.Match[str]) -> str:
        kind, content = match[1], match[2].lstrip("~")
        if kind == "math":
            return to_mathml(content)
        name = content.rpartition(".")[2]
        return f"[`{name}`][{targets[name]}]" if name in targets else f"`{content}`"

    text = re.sub(r":(\w+):`([^`]+)`", role, text)
    return re.sub(r"``(.+?)``", r"`\1`", text)


def documented_names() -> list[str]:
    """Full names of everything the pages of the reference document."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md"))]
    return [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, flags=re.MULTILINE)]
