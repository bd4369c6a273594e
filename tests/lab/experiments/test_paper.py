"""The table of what the paper states: every statement finds its verdict, and nothing is judged that was not run."""

from pathlib import Path

import pytest

from betternorm.cli import main
from betternorm.lab.experiments import paper, protocol, registry, runner, saved_rows
from betternorm.lab.results import Outcome, Result, Verdict
from betternorm.lab.store import Store

ROOT = Path(__file__).parents[3]


STATEMENTS = [one for these in paper.STATEMENTS.values() for one in these]


def result(scale, *verdicts, name="ghost-size"):
    return Result(name, "title", "place", scale, "command", [], [], verdicts, [])


def row(results, says="ghosts raise top-1 where networks overfit"):
    return next(line for table in paper.tables(results) for line in table.rows if line[0] == says)


def verdict(scale, outcome=Outcome.SEEN, **details):
    data = paper.FEW if scale == "medium" else "Flowers-102"
    claim = f"{data}: ghost size 8, the best on validation data, improves on batch norm (test top-1)"
    return Verdict(claim, outcome, "", measured=f"+1 {scale}", detectable=0.5, **details)


def test_the_medium_scale_counts_before_the_small_one():
    medium, small = (result(scale, verdict(scale)) for scale in ("medium", "small"))
    assert row([small, medium])[3] == "+1 medium, medium"
    assert row([small])[3] == "+1 small, small"
    assert row([])[-1] == "not run yet"


def test_what_cannot_be_tested_has_its_reason():
    assert row([], "decay changes nothing on SVHN")[-1] == "not tested: SVHN is not at hand"


@pytest.fixture(scope="module")
def claims(tmp_path_factory):
    """Of every experiment and scale that statements are judged by, from the rows of docs/results."""
    store = Store(tmp_path_factory.mktemp("store"))
    found = {}
    for scale in paper.ORDER:
        saved_rows.restore(ROOT / "docs" / "results" / ("medium" if scale == "medium" else ""), scale, store)
        for name in {one.experiment for one in STATEMENTS} & {*registry.names_at(scale)}:
            found[name, scale] = [one.claim for one in runner.result(name, scale, store).verdicts]
    return found


@pytest.mark.parametrize("statement", [one for one in STATEMENTS if not one.untested], ids=lambda one: one.says)
def test_every_statement_has_a_claim_that_judges_it(statement, claims):
    judged = [
        claim
        for scale in paper.ORDER
        for claim in claims.get((statement.experiment, scale), [])
        if all(word in claim for word in paper.words_of(statement, scale))
    ]
    waiting = statement.experiment not in protocol.FIXED or statement.experiment == "ghost-size"
    assert judged or waiting  # for hyperparameters, or for the best ghost size to be found


def test_rows_are_judged_anew_without_running_anything(tmp_path, capsys):
    """The one command behind every number of the results."""
    pages = tmp_path / "pages"
    (pages / "decay").mkdir(parents=True)
    rows = (ROOT / "docs" / "results" / "decay" / "rows.csv").read_text()
    (pages / "decay" / "rows.csv").write_text(rows)
    words = ["decay", "--scale", "small", "--rows-only", "--pages", str(pages), "--folder", str(tmp_path / "store")]
    assert main(["reproduce", *words, "--quiet"]) == 0
    assert "UNDERPOWERED: pre-activation network: decay on gamma and beta raises test top-1" in capsys.readouterr().out
    overview = (pages / "index.md").read_text()
    assert "| gamma toward 0 or toward 1 makes no difference |" in overview
    assert "(#weight-decay-on-gamma-and-beta) |  | 1 | 2 | 1 |" in overview  # nothing seen, one underpowered ...
    assert (pages / "decay.md").read_text() == (ROOT / "docs" / "results" / "decay.md").read_text()
