"""The norm layers of a model as an SVG graph, colored by their effect."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from betternorm.decay.report import NormLayer, NormReport


def draw(report: NormReport) -> str:
    """Boxes in rows by their distance from the input, connected by lines."""
    order = {layer.name: position for position, layer in enumerate(_in_call_order(report))}
    forward = [(a, b) for a, b in report.edges if b == "output" or order[a] < order[b]]
    backward = [(a, b) for a, b in report.edges if (a, b) not in set(forward)]
    depth = {"input": 0}
    for name in order:
        depth[name] = 1 + max((depth[a] for a, b in forward if b == name), default=0)
    depth["output"] = 1 + max(depth.values())
    forward += [("input", name) for name in order if not any(b == name for _, b in forward)]
    rows: dict[int, list[str]] = {}
    for name, row in depth.items():
        rows.setdefault(row, []).append(name)

    wide, high, gap = 210, 40, 30
    columns = max(map(len, rows.values()))
    width, height = columns * (wide + gap) + 3 * gap, len(rows) * (high + gap) + gap
    corner = {
        name: (width / 2 + (i - len(names) / 2) * (wide + gap) + gap / 2, gap + row * (high + gap))
        for row, names in rows.items()
        for i, name in enumerate(names)
    }
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" role="img" aria-label="norm layers, darker with more effect">'
    ]
    for edges, dash in ((forward, ""), (backward, ' stroke-dasharray="4 3"')):
        for source, target in edges:
            (x1, y1), (x2, y2) = corner[source], corner[target]
            x1, y1, x2 = x1 + wide / 2, y1 + high, x2 + wide / 2
            bend = (wide / 2 + gap) * 4 / 3 if y2 - y1 > gap and x1 == x2 else 0  # around the boxes between
            drawn.append(
                f'<path d="M{x1:.0f} {y1:.0f} C{x1 + bend:.0f} {y1 + gap:.0f} {x2 + bend:.0f} {y2 - gap:.0f} '
                f'{x2:.0f} {y2:.0f}" fill="none" stroke="#888"{dash}/>'
            )
    for name, (x, y) in corner.items():
        if name in order:
            layer = report[name]
            effect = "no gamma" if layer.effect is None else f"effect {layer.effect:.2f}"
            lines = [name or "(the model)", f"{layer.kind} · {effect}"]
            fill, hint = color(layer.effect), f"{name}: {layer.why}"
        else:
            lines, fill, hint = [name], "#eeeeee", name
        dark = name in order and (report[name].effect or 0) > 0.6
        text = "".join(
            f'<text x="{x + wide / 2:.0f}" y="{y + high / 2 + 4 + 15 * (i - (len(lines) - 1) / 2):.0f}" '
            f'text-anchor="middle" fill="{"#fff" if dark else "#222"}">{escape(_shorten(line))}</text>'
            for i, line in enumerate(lines)
        )
        drawn.append(
            f'<g><title>{escape(hint)}</title><rect x="{x:.0f}" y="{y:.0f}" width="{wide}" height="{high}" rx="6" '
            f'fill="{fill}" stroke="#555"/>{text}</g>'
        )
    return "\n".join([*drawn, "</svg>"])


def _in_call_order(report: NormReport) -> list[NormLayer]:
    """The layers of the graph in topological order, as far as it has no cycles."""
    drawn = {name for edge in report.edges for name in edge}
    waiting = [layer for layer in report if layer.name in drawn]
    placed: list[NormLayer] = []
    while waiting:
        names = {layer.name for layer in waiting}
        free = [
            layer for layer in waiting if not any(b == layer.name and a != b and a in names for a, b in report.edges)
        ]
        placed.extend(free or waiting[:1])
        waiting = [layer for layer in waiting if layer not in placed]
    return placed


def color(effect: float | None) -> str:
    """From white for no effect to dark red."""
    if effect is None:
        return "#dddddd"
    stops = [(255, 255, 255), (253, 174, 97), (165, 0, 38)]
    position = effect * (len(stops) - 1)
    low = min(int(position), len(stops) - 2)
    mixed = (a + (position - low) * (b - a) for a, b in zip(stops[low], stops[low + 1], strict=True))
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def _shorten(text: str, most: int = 32) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"
