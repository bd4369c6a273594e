"""What results are called on a page and in files, and how many of their claims came to what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from betternorm_lab.results import Outcome, Result, Verdict


def names(results: Sequence[Result]) -> list[str]:
    """One for each result, fit for a file and an anchor: its name, with the scale where a name comes twice."""
    return [f"{result.name}-{result.scale}" if twice else result.name for result, twice in _repeated(results)]


def titles(results: Sequence[Result]) -> list[str]:
    """One for each result, with the scale where an experiment comes twice."""
    return [f"{result.title} ({result.scale})" if twice else result.title for result, twice in _repeated(results)]


def _repeated(results: Sequence[Result]) -> list[tuple[Result, bool]]:
    often = Counter(result.name for result in results)
    return [(result, often[result.name] > 1) for result in results]


def subtitle(result: Result) -> str:
    """Where in the paper, at which scale, from how many trials."""
    count = f"{len(result.rows)} trial{'' if len(result.rows) == 1 else 's'}"
    return " · ".join(part for part in (result.place, f"scale {result.scale}" if result.scale else "", count) if part)


def counts(verdicts: Iterable[Verdict]) -> dict[Outcome, int]:
    """How many claims came to what, in the order of the outcomes."""
    found = Counter(verdict.outcome for verdict in verdicts)
    return {outcome: found[outcome] for outcome in Outcome}


def tally(verdicts: Iterable[Verdict]) -> str:
    """The same in words, ``3 seen, 1 contradicted``; empty without claims."""
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts(verdicts).items() if count)
