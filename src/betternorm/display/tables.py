"""Plain-text tables, for everything that this package prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right, text to the left.

    >>> print(table(["layer", "channels"], [["stem", 64], ["head", 1024]]))
    layer  channels
    ─────  ────────
    stem         64
    head       1024
    """
    body = [[shown(value) for value in row] for row in rows]
    right = [all(is_number(cell) for cell in column) for column in zip(*body, strict=True)] or [False] * len(headers)
    widths = [max(map(len, column)) for column in zip(headers, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ).rstrip()

    return "\n".join([line(headers), "  ".join("─" * width for width in widths), *map(line, body)])


def shown(value: object) -> str:
    """A value as it stands in a table: four significant digits of a float, nothing for None."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def is_number(cell: str) -> bool:
    """Whether a cell is a number, a percentage or empty, and so belongs to the right of its column."""
    try:
        float(cell.rstrip("%") or "0")
    except ValueError:
        return False
    return True
