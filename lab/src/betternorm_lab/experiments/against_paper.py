"""The paper's statements with our verdicts, as tables and as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from betternorm_lab.experiments.paper import SCALES, STATEMENTS, Statement
from betternorm_lab.results import Figure, Outcome, Result, Series, Table, Verdict

TITLE = "The paper's numbers and ours"
HEADERS = ["statement", "section", "paper", "ours", "paper in our interval", "detectable", "our test", "verdict"]


def tables(results: Sequence[Result]) -> list[Table]:
    """Every statement with its verdict, one table per technique."""
    return [Table(name, HEADERS, [_row(one, results) for one in group]) for name, group in STATEMENTS.items()]


def sanity_checks(results: Sequence[Result]) -> Table:
    """Claims that are expected to hold almost by construction."""
    rows = [
        [verdict.claim, result.scale, verdict.measured or verdict.evidence, f"**{verdict.outcome.value}**"]
        for result in results
        for verdict in result.verdicts
        if verdict.sanity
    ]
    return Table("Sanity checks", ["claim", "scale", "ours", "verdict"], rows)


def figure(results: Sequence[Result]) -> Figure:
    """Every statement with a difference in points of top-1 in the paper and a measured one here."""
    paper: list[tuple[str, float]] = []
    ours: dict[str, list[tuple[str, tuple[float, float, float]]]] = {scale: [] for scale in SCALES}
    for statement in (one for group in STATEMENTS.values() for one in group if one.points):
        judged = verdict_on(statement, results)
        if judged is None or judged[1].difference is None:
            continue
        paper += [(statement.says, points) for points in statement.points]
        ours[judged[0]].append((statement.says, judged[1].difference))
    series = [Series("paper", [says for says, _ in paper], [points for _, points in paper])] if paper else []
    for scale, measured in ours.items():
        if measured:
            names, values = zip(*measured, strict=True)
            mean, low, high = zip(*values, strict=True)
            series.append(Series(f"ours, {scale} scale, 95 % interval", names, mean, low, high))
    return Figure(TITLE, "", "difference in top-1, points", series, "point", levels={"0": 0.0})


def verdict_on(statement: Statement, results: Sequence[Result]) -> tuple[str, Verdict] | None:
    """The verdict on a statement and its scale, if anything has been run."""
    for scale in SCALES:
        for result in results:
            if (result.name, result.scale) == (statement.experiment, scale):
                for verdict in result.verdicts:
                    if verdict.id == statement.claims.get(scale) and verdict.outcome is not Outcome.NOT_TESTED:
                        return scale, verdict
    return None


def _row(statement: Statement, results: Sequence[Result]) -> list[object]:
    start = [statement.says, statement.place, statement.number]
    judged = verdict_on(statement, results)
    if judged is None:
        return [*start, "", "", "", statement.untested, f"**{Outcome.NOT_TESTED.value}**"]
    scale, verdict = judged
    detectable = "" if verdict.detectable is None or math.isinf(verdict.detectable) else f"{verdict.detectable:.2g}"
    ours = f"{verdict.measured or 'see the page'}, {scale}"
    outcome = f"**{verdict.outcome.value}**"
    return [*start, ours, _contains(statement, verdict), detectable, statement.differs.get(scale, ""), outcome]


def _contains(statement: Statement, verdict: Verdict) -> str:
    """Whether our interval contains the paper's differences."""
    if verdict.difference is None or not statement.points:
        return ""
    _, low, high = verdict.difference
    return ", ".join("yes" if low <= points <= high else "no" for points in statement.points)
