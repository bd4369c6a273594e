"""A progress bar on standard error; a line from time to time if that is not a terminal.

By default it is shown on a terminal only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
EVERY = {True: 0.1, False: 5.0}  # seconds between two updates, on a terminal or not


def track(iterable: Iterable[T], label: str, total: int | None = None, show: bool | None = None) -> Iterator[T]:
    """Yield from ``iterable`` and show the progress and the remaining time.

    ``total`` defaults to ``len(iterable)``. ``show=None`` shows the bar on a terminal only.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    bar = Bar(label, total, show)
    with bar:
        for item in iterable:
            yield item
            bar.advance()


class Bar:
    """A progress bar that is advanced explicitly: ``with Bar("tuning", 100) as bar: ... bar.advance(10, "loss 0.31")``.

    ``done`` steps were completed earlier; they do not enter the estimate of the remaining time.
    """

    def __init__(self, label: str, total: int | None = None, show: bool | None = None, done: int = 0) -> None:
        self.label, self.total, self.done, self.note = label, total, done, ""
        self._before = done
        self._terminal = sys.stderr.isatty()
        self.show = self._terminal if show is None else show
        self._started = self._drawn = time.monotonic()

    def __enter__(self) -> Bar:
        self._started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self.show:
            self._draw()
            if self._terminal:
                sys.stderr.write("\n")
                sys.stderr.flush()

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.done += steps
        self.note = note or self.note
        now = time.monotonic()
        if self.show and now - self._drawn >= EVERY[self._terminal]:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        elapsed = time.monotonic() - self._started
        if self.total:
            part = min(self.done / self.total, 1.0)
            filled = round(24 * part)
            new = self.done - self._before
            left = clock(elapsed * max(self.total - self.done, 0) / new) if new else "--:--"
            text = f"{'█' * filled}{'░' * (24 - filled)} {part:4.0%}  {self.done}/{self.total}  {left} left"
        else:
            text = f"{self.done}  {clock(elapsed)}"
        line = f"{self.label} {text}{'  ' + self.note if self.note else ''}"
        sys.stderr.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        sys.stderr.flush()


def clock(seconds: float) -> str:
    """``75`` as ``1:15``, ``3700`` as ``1:01:40``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
