"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows as a table; columns of numbers are right-aligned.

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
    """A value as text: floats with four significant digits, None as an empty cell."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def is_number(cell: str) -> bool:
    """Whether a cell is a number, a percentage or empty, and thus right-aligned."""
    try:
        float(cell.rstrip("%") or "0")
    except ValueError:
        return False
    return True
