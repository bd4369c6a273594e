"""What came of each statement of the paper here: the tables at the head of the results, and its numbers beside ours.

A statement is judged at the medium scale where that was run, and else at the small one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from betternorm_lab.experiments.paper import STATEMENTS, Statement
from betternorm_lab.results import Figure, Outcome, Result, Series, Table, Verdict

ORDER = ("medium", "small")  # of two verdicts on a statement the first that was run counts
HEADERS = ["the paper", "where", "its number", "ours", "could have been seen", "how ours differs", "verdict"]


def tables(results: Sequence[Result]) -> list[Table]:
    """Every statement with what came of it, a table for each technique."""
    return [Table(name, HEADERS, [_row(one, results) for one in these]) for name, these in STATEMENTS.items()]


def figure(results: Sequence[Result]) -> Figure:
    """Every statement for which the paper gives a difference in points of top-1 and we have measured one."""
    theirs: list[tuple[str, float]] = []
    ours: dict[str, list[tuple[str, tuple[float, float, float]]]] = {scale: [] for scale in ORDER}
    for statement in (one for these in STATEMENTS.values() for one in these if one.points):
        found = _verdict(statement, results)
        if found is None or found[1].difference is None:
            continue
        theirs += [(statement.says, points) for points in statement.points]
        ours[found[0]].append((statement.says, found[1].difference))
    series = [Series("the paper", [says for says, _ in theirs], [points for _, points in theirs])] if theirs else []
    for scale, measured in ours.items():
        if measured:
            names, values = zip(*measured, strict=True)
            mean, low, high = zip(*values, strict=True)
            series.append(Series(f"here, {scale} scale, 95 % interval", names, mean, low, high))
    return Figure(
        "The paper's numbers beside ours", "", "difference in top-1, points", series, kind="point", levels={"none": 0.0}
    )


def _row(statement: Statement, results: Sequence[Result]) -> list[object]:
    told = [statement.says, statement.place, statement.number]
    if statement.untested:
        return [*told, "", "", "", f"not tested: {statement.untested}"]
    found = _verdict(statement, results)
    if found is None:
        return [*told, "", "", statement.differs, "not run yet"]
    scale, verdict = found
    shown = "" if verdict.detectable is None or math.isinf(verdict.detectable) else f"{verdict.detectable:.2g}"
    differs = statement.small if scale == "small" else statement.differs
    ours = f"{verdict.measured or 'see the page'}, {scale}"
    return [*told, ours, shown, differs, f"**{verdict.outcome.value}**"]


def _verdict(statement: Statement, results: Sequence[Result]) -> tuple[str, Verdict] | None:
    """The verdict that judges a statement, with its scale, where anything has been run."""
    for scale in [statement.scale] if statement.scale else ORDER:
        for result in results:
            if (result.name, result.scale) == (statement.experiment, scale):
                for verdict in result.verdicts:
                    run = verdict.outcome is not Outcome.NOT_RUN
                    if run and all(word in verdict.claim for word in words_of(statement, scale)):
                        return scale, verdict
    return None


def words_of(statement: Statement, scale: str) -> tuple[str, ...]:
    """What the claim that judges a statement has in it. At the small scale there is one setting."""
    return (*statement.words, statement.setting) if scale == "medium" else statement.words
