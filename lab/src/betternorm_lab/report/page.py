"""Results as one HTML page that needs nothing else: no network, no other file.

The page is complete without its script: every claim, table and number is in the HTML. The script draws the charts from
the data beside it and lets them be read off by pointer, arrow keys and slider.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from betternorm import __version__
from betternorm.display.tables import is_number, shown
from betternorm_lab.report import charts, labels, provenance
from betternorm_lab.results import Figure, Outcome, Result, Table, Verdict
from betternorm_lab.store import atomic, make_folder

BADGES = {
    Outcome.SEEN: ("seen", "✓"),
    Outcome.CONTRADICTED: ("not-seen", "✗"),
    Outcome.NO_DIFFERENCE: ("undecided", "="),
    Outcome.UNDERPOWERED: ("undecided", "–"),
    Outcome.NOT_RUN: ("undecided", "·"),
}


def write(results: Sequence[Result], path: str | os.PathLike[str], title: str = "Results") -> Path:
    """Write the page to ``path``; a page that was there is replaced in one stroke."""
    path = Path(path)
    make_folder(path.parent)
    with atomic(path) as draft:
        draft.write_text(page(results, title), encoding="utf-8")
    return path


def page(results: Sequence[Result], title: str = "Results") -> str:
    """The whole page as text."""
    named = list(zip(labels.names(results), labels.titles(results), results, strict=True))
    data: dict[str, Any] = {"charts": {}, "panels": {}}
    common = _common(results)
    sections = [_section(name, title, result, common, data) for name, title, result in named]
    return Template(_file("page.html")).substitute(
        version=__version__,
        title=escape(title),
        colours=_colours(),
        style=_file("page.css"),
        lead=_lead(results, common),
        contents="\n".join(_entry(name, title, result) for name, title, result in named),
        sections="\n".join(sections),
        # Inside a script element "</" or "<!--" would be markup; JSON has another way to write the sign.
        data=json.dumps(data, allow_nan=False, ensure_ascii=False).replace("<", "\\u003c"),
        script=_file("page.js"),
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


def _colours() -> str:
    """The colours of the series as CSS variables, for both schemes."""
    light, dark = (
        " ".join(f"--series-{number}: {pair[scheme]};" for number, pair in enumerate(charts.COLOURS))
        for scheme in (0, 1)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def _paragraphs(result: Result) -> list[str]:
    return [paragraph.strip() for paragraph in result.notes.split("\n\n") if paragraph.strip()]


def _common(results: Sequence[Result]) -> list[str]:
    """What the notes of all results say alike, such as the rule of the verdicts: a page says it once, at its head."""
    if len(results) < 2:
        return []
    return [paragraph for paragraph in _paragraphs(results[0]) if all(paragraph in _paragraphs(r) for r in results)]


def _lead(results: Sequence[Result], common: Sequence[str]) -> str:
    trials = len({row.key for result in results for row in result.rows})
    verdicts = [verdict for result in results for verdict in result.verdicts]
    words = f"{_count(len(results), 'experiment')}, {_count(trials, 'trial')}, {_count(len(verdicts), 'claim')}"
    said = "".join(f"<p>{_prose(paragraph)}</p>" for paragraph in common)
    return f'<p class="lead">{words}.</p>\n{_tally(verdicts)}{said}'


def _tally(verdicts: Sequence[Verdict]) -> str:
    """How many claims came to what, as figures with a word each."""
    items = "".join(
        f'<li class="{BADGES[outcome][0]}"><span class="count">{count}</span> {outcome.value}</li>'
        for outcome, count in labels.counts(verdicts).items()
    )
    return f'<ul class="tally" aria-label="Claims by outcome">{items}</ul>' if verdicts else ""


def _entry(name: str, title: str, result: Result) -> str:
    marks = "".join(
        f'<span class="mark {BADGES[outcome][0]}">{BADGES[outcome][1]} {count}</span>'
        for outcome, count in labels.counts(result.verdicts).items()
        if count
    )
    words = labels.tally(result.verdicts)
    tally = f'<span class="marks" aria-hidden="true">{marks}</span><span class="unseen">: {words}</span>'
    return f'<li><a href="#{escape(name)}">{escape(title)}</a>{tally if words else ""}</li>'


def _section(name: str, title: str, result: Result, common: Sequence[str], data: dict[str, Any]) -> str:
    """An experiment, without what is said at the head of the page; what its charts need is added to ``data``."""
    parts = [f'<p class="place">{escape(labels.subtitle(result))}</p>']
    parts += [f"<p>{_prose(paragraph)}</p>" for paragraph in _paragraphs(result) if paragraph not in common]
    if result.verdicts:
        parts.append(f"<h3>Claims</h3><ul class='claims'>{''.join(map(_verdict, result.verdicts))}</ul>")
    if result.figures:
        parts.append("<h3>Figures</h3>")
        parts += [_panel(name, number, group, data) for number, group in enumerate(_panels(result.figures), 1)]
    if result.tables:
        parts.append("<h3>Tables</h3>")
        parts += map(_table, result.tables)
    parts.append(_provenance(result))
    heading = f'<h2 id="{escape(name)}-title">{escape(title)}</h2>'
    body = "\n".join(parts)
    return f'<section id="{escape(name)}" aria-labelledby="{escape(name)}-title">{heading}\n{body}\n</section>'


def _verdict(verdict: Verdict) -> str:
    style, sign = BADGES[verdict.outcome]
    badge = f'<span class="badge {style}"><span aria-hidden="true">{sign}</span> {verdict.outcome.value}</span>'
    claim, evidence = _prose(verdict.claim), _prose(verdict.evidence)
    return f'<li>{badge}<div><p class="claim">{claim}</p><p class="evidence">{evidence}</p></div></li>'


def _panels(figures: Sequence[Figure]) -> list[list[Figure]]:
    """Neighbours that show different metrics along one slider share it, so that all are read off at once."""
    panels: list[list[Figure]] = []
    for figure in figures:
        last = panels[-1] if panels else []
        together = last and _slides(figure) and _slides(last[0]) and figure.x_label == last[0].x_label
        if together and figure.y_label not in [other.y_label for other in last]:
            last.append(figure)
        else:
            panels.append([figure])
    return panels


def _slides(figure: Figure) -> bool:
    return figure.slider and not charts.categorical(figure) and bool(charts.positions([figure]))


def _panel(name: str, number: int, figures: Sequence[Figure], data: dict[str, Any]) -> str:
    panel = f"{name}-panel-{number}"
    chart_names = [f"{panel}-chart-{place}" for place in range(1, len(figures) + 1)]
    data["charts"] |= {chart: _chart_data(figure) for chart, figure in zip(chart_names, figures, strict=True)}
    drawn = "\n".join(map(_figure, chart_names, figures))
    if not _slides(figures[0]):
        return drawn
    data["panels"][panel] = {"positions": charts.positions(figures), "charts": chart_names}
    return f'<div class="panel" id="{panel}">\n{_slider(panel, figures)}\n<div class="charts">{drawn}</div>\n</div>'


def _slider(panel: str, figures: Sequence[Figure]) -> str:
    """A slider over every x, and a table of what each series is there: a row for a series, a column for a figure."""
    x_label, last = escape(figures[0].x_label), len(charts.positions(figures)) - 1
    series = dict.fromkeys(series.name for figure in figures for series in figure.series)
    head = "".join(f'<th scope="col">{escape(figure.y_label)}</th>' for figure in figures)
    body = "".join(f'<tr><th scope="row">{escape(name)}</th>{"<td></td>" * len(figures)}</tr>' for name in series)
    return f"""<div class="slider">
<p class="control"><label for="{panel}-slider">{x_label}</label>
<input type="range" id="{panel}-slider" min="0" max="{last}" step="1" value="0">
<output for="{panel}-slider"></output></p>
<div class="scroll" tabindex="0" role="group" aria-label="All series at this {x_label}">
<table class="readings"><thead><tr><th scope="col">series</th>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p class="hint between">≈ lies between two measured points.</p>
</div>"""


def _figure(chart: str, figure: Figure) -> str:
    label = f"Chart: {figure.title}. {figure.y_label} by {figure.x_label}. Arrow keys read off the points."
    keys = [
        _key(f"s{number % len(charts.COLOURS)}", _dash(figure, number), series.name)
        for number, series in enumerate(figure.series)
    ]
    keys += [_key("level", "", f"{name}: {shown(level)}") for name, level in figure.levels.items()]
    across, along = figure.y_label, figure.x_label
    if charts.categorical(figure):  # lies on its side
        across, along = along, across
    return f"""<figure>
<figcaption>{escape(figure.title)}</figcaption>
<ul class="legend">{"".join(keys)}</ul>
<p class="axis" aria-hidden="true">{escape(across)}</p>
<div class="plot"><div class="chart" id="{chart}" tabindex="0" role="img" aria-label="{escape(label)}"></div>
<div class="tip" role="status"></div></div>
<p class="axis along" aria-hidden="true">{escape(along)}</p>
<details><summary>The numbers</summary>{_table(charts.numbers(figure))}</details>
</figure>"""


def _key(style: str, dash: str, words: str) -> str:
    """An entry of a legend: a piece of the line, and what it is."""
    piece = f'<line x1="0" y1="4" x2="24" y2="4" stroke-dasharray="{dash}"/>'
    return f'<li><svg class="swatch {style}" viewBox="0 0 24 8" aria-hidden="true">{piece}</svg>{escape(words)}</li>'


def _dash(figure: Figure, number: int) -> str:
    return "" if charts.categorical(figure) else charts.DASHES[number % len(charts.DASHES)]


def _chart_data(figure: Figure) -> dict[str, Any]:
    """What the script needs to draw a figure, without decisions left to make."""
    categorical = charts.categorical(figure)
    return {
        "bars": categorical,
        "fromZero": categorical and charts.starts_at_zero(figure),
        "logX": figure.log_x and not categorical,
        "xLabel": figure.x_label,
        "positions": charts.positions([figure]),
        "levels": list(map(_finite, figure.levels.values())),
        "series": [
            {
                "name": series.name,
                "colour": f"s{number % len(charts.COLOURS)}",
                "dash": _dash(figure, number),
                "x": [str(x) if categorical else float(x) for x in series.x],
                "y": list(map(_finite, series.y)),
                "low": None if series.low is None else list(map(_finite, series.low)),
                "high": None if series.high is None else list(map(_finite, series.high)),
            }
            for number, series in enumerate(figure.series)
        ],
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _table(table: Table) -> str:
    body = [[shown(value) for value in row] for row in table.rows]
    right = [bool(body) and all(is_number(row[column]) for row in body) for column in range(len(table.headers))]
    label, head = escape(table.title), _cells("th", table.headers, right)
    if not body:
        return f'<p class="hint">{label}: nothing has been run yet.</p>'
    lines = "".join(f"<tr>{_cells('td', row, right)}</tr>" for row in body)
    return f"""<div class="scroll" tabindex="0" role="group" aria-label="{label}"><table>
<caption>{label}</caption><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"""


def _cells(tag: str, texts: Iterable[str], right: Iterable[bool]) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    return "".join(
        f"<{tag}{scope}{' class=number' if to_right else ''}>{escape(text)}</{tag}>"
        for text, to_right in zip(texts, right, strict=True)
    )


def _provenance(result: Result) -> str:
    parts = [f"<p>The command:</p><pre><code>{escape(result.command)}</code></pre>"]
    if result.rows:
        same, trials = provenance.settings_of(result.rows)
        items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in same.items())
        parts += [f"<p>The same for all trials:</p><dl>{items}</dl>"] if same else []
        parts.append(_table(trials))
    return f'<details class="provenance"><summary>Where the numbers come from</summary>{"".join(parts)}</details>'


def _prose(text: str) -> str:
    """Text with the two marks that notes use, as in Markdown: `code` and *stress*."""
    marked = re.sub(r"(`+)([^`]+)\1", r"<code>\2</code>", escape(text))
    return re.sub(r"(?<!\w)\*([^*\s][^*]*)\*(?!\w)", r"<em>\1</em>", marked)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
