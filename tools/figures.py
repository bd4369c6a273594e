"""The pictures of the method pages: which values share their statistics, on a grid of examples and channels.

python tools/figures.py    # writes docs/methods/*.svg
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

METHODS = Path(__file__).parents[1] / "docs" / "methods"
CELL, EXAMPLES, CHANNELS = 20, 8, 8
LIGHT, DARK = ("#e8eaf6", "#d1d9ff"), "#3f51b5"
TEXT, MUTED, ORANGE = "#202124", "#5f6368", "#ef6c00"

Group = Callable[[int, int], int | None]  # from example and channel to the number of the group, None for no group


def grid(x: float, title: str, group: Group, note: str, highlighted: int = 0) -> list[str]:
    """A panel: one cell per example and channel, shaded by group, one group highlighted."""
    out = [_text(x + EXAMPLES * CELL / 2, 22, title, weight="bold")]
    for example in range(EXAMPLES):
        for channel in range(CHANNELS):
            number = group(example, channel)
            fill = "#ffffff" if number is None else DARK if number == highlighted else LIGHT[number % 2]
            out.append(_rect(x + example * CELL, 34 + channel * CELL, CELL, CELL, fill))
    out.append(_text(x + EXAMPLES * CELL / 2, 212, "examples →", MUTED))
    out.append(
        f'<text transform="translate({x - 8:g} {34 + CHANNELS * CELL / 2:g}) rotate(-90)" text-anchor="middle" '
        f'fill="{MUTED}">← channels</text>'
    )
    out += [_text(x + EXAMPLES * CELL / 2, 232 + 16 * i, line, TEXT) for i, line in enumerate(note.split("\n"))]
    return out


def _text(x: float, y: float, text: str, fill: str = TEXT, weight: str = "normal", anchor: str = "middle") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{escaped}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "#9fa8da") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'


def _arrow(x1: float, y1: float, x2: float, y2: float, color: str = MUTED) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" stroke-width="2" '
        'marker-end="url(#arrow)"/>'
    )


def svg(width: float, height: float, label: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="13" role="img" aria-label="{label}">'
    )
    marker = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{MUTED}"/></marker></defs>'
    )
    return "\n".join([head, marker, _rect(0, 0, width, height, "#ffffff", "none"), *parts, "</svg>"]) + "\n"


def panels(label: str, *drawn: tuple[str, Group, str]) -> str:
    wide = EXAMPLES * CELL + 60
    parts = [part for i, (title, group, note) in enumerate(drawn) for part in grid(40 + i * wide, title, group, note)]
    return svg(len(drawn) * wide + 20, 264, label, parts)


BATCH = ("Batch Norm", lambda n, c: c, "one channel,\nthe whole batch")
GHOST = ("Ghost Batch Norm", lambda n, c: 2 * c + n // 4 + c % 2, "one channel,\n4 examples at a time")
GROUP = ("Group Norm", lambda n, c: n + 9 * (c // 4), "4 channels,\none example")
BATCH_GROUP = ("Batch Group Norm", lambda n, c: n // 2 + 5 * (c // 4), "4 channels,\n2 examples")
INSTANCE = ("Instance Norm", lambda n, c: n + 9 * c, "one channel,\none example")


def inference() -> str:
    """Where the statistics come from: in training, at inference, and at inference with alpha."""
    parts = grid(40, "Training", lambda n, c: c, "statistics of the batch:\nthe example takes part")
    parts += grid(
        300,
        "Inference, alpha = 0",
        lambda n, c: None if n else c,
        "moving averages only:\nthe example takes no part",
        highlighted=-1,
    )
    parts += grid(
        560, "Inference, alpha = 0.1", lambda n, c: None if n else c, "0.9 × moving averages\n+ 0.1 × the example's own"
    )
    for x in (300, 560):
        parts += [_rect(x + 62, 76, 90, 40, "#fff3e0", ORANGE), _text(x + 107, 93, "moving", ORANGE)]
        parts.append(_text(x + 107, 109, "averages", ORANGE))
    return svg(760, 264, "Where the statistics of one channel come from, in training and at inference", parts)


def per_channel() -> str:
    """One alpha for the model, and one per channel."""
    parts = []
    for x, title, alphas in (
        (30, "one alpha (tune_alpha)", [0.1] * 8),
        (330, "one per channel (fit_alpha)", [0.02, 0.31, 0.08, 0.0, 0.45, 0.12, 0.6, 0.05]),
    ):
        parts.append(_text(x + 120, 22, title, weight="bold"))
        for channel, alpha in enumerate(alphas):
            y = 36 + 22 * channel
            parts += [_rect(x, y, 240, 16, "#fff3e0", ORANGE), _rect(x, y, 240 * alpha, 16, DARK, DARK)]
        parts.append(_text(x + 120, 232, "channels ↓   blue: weight of the example's own statistics", MUTED))
    return svg(600, 248, "Weights of the example's own statistics: one for all channels, or one per channel", parts)


def decay() -> str:
    """In a chain the next norm undoes the scale; next to an identity it does not."""
    parts = [_text(20, 24, "Scale undone: gamma and beta only change the effective learning rate", anchor="start")]
    parts += _chain(40, ["conv", "norm γ", "conv", "norm γ", "conv", "norm γ", "linear"], {1, 3})
    parts.append(
        _text(20, 124, "Scale matters: the last norm of a residual branch is added to the identity", anchor="start")
    )
    parts += _chain(140, ["conv", "norm γ", "conv", "norm γ", "+", "…", "linear"], {1})
    parts.append(
        f'<path d="M20 160 C60 230 430 230 454 182" fill="none" stroke="{MUTED}" stroke-width="2" '
        'marker-end="url(#arrow)"/>'
    )
    parts += [_rect(20, 236, 16, 16, DARK, DARK), _text(42, 249, "weight decay has an effect", anchor="start")]
    parts += [_rect(240, 236, 16, 16, "#eeeeee", MUTED), _text(262, 249, "undone by the next norm", anchor="start")]
    return svg(760, 264, "Where weight decay on gamma and beta has an effect", parts)


def _chain(y: float, names: list[str], undone: set[int]) -> list[str]:
    out = []
    for i, name in enumerate(names):
        x, norm = 40 + i * 100, name.startswith("norm")
        fill = "#eeeeee" if i in undone else DARK if norm else "#ffffff"
        out += [_arrow(x - 20, y + 20, x, y + 20), _rect(x, y, 76, 40, fill, MUTED)]
        out.append(_text(x + 38, y + 25, name, "#ffffff" if norm and i not in undone else TEXT))
    return out


FIGURES: dict[str, Callable[[], str]] = {
    "ghost-batch-norm.svg": lambda: panels("Ghost Batch Norm next to Batch Norm", BATCH, GHOST),
    "batch-group-norm.svg": lambda: panels("Batch Group Norm next to Group Norm", GROUP, BATCH_GROUP, BATCH),
    "normalization.svg": lambda: panels("Which values share statistics", BATCH, GHOST, BATCH_GROUP, GROUP, INSTANCE),
    "inference-example-weighing.svg": inference,
    "alpha-per-channel.svg": per_channel,
    "weight-decay.svg": decay,
}


if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (METHODS / name).write_text(draw(), encoding="utf-8")
