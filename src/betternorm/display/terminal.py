"""Colors on a terminal, plain text everywhere else."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32"}


def supports_color(stream: TextIO) -> bool:
    """Whether to use colors: on a terminal, unless NO_COLOR (no-color.org) is set or TERM=dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: TextIO) -> str:
    """``text`` in a style: bold, dim, red or green, if the stream supports it."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if supports_color(stream) else text


def show(text: object) -> None:
    """Print, with the headings of tables in bold on a terminal."""
    lines = str(text).split("\n")
    for number, line in enumerate(lines):
        if line and not line.strip("─ ") and number:
            lines[number - 1] = paint(lines[number - 1], "bold", sys.stdout)
            lines[number] = paint(line, "dim", sys.stdout)
    print("\n".join(lines))
