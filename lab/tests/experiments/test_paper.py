"""The table of what the paper states: every statement finds its verdict, and nothing is judged that was not run."""

import re
from pathlib import Path

import pytest
from betternorm_lab.experiments import against_paper, paper, protocol, registry, runner, saved_rows
from betternorm_lab.report import files, overview
from betternorm_lab.results import Outcome, Result, Verdict
from betternorm_lab.store import Store

from betternorm.cli.main import main

ROOT = Path(__file__).parents[3]


STATEMENTS = [one for these in paper.STATEMENTS.values() for one in these]


def result(scale, *verdicts, name="ghost-size"):
    return Result(name, "title", "place", scale, "command", [], [], verdicts, [])


def row(results, says="ghosts raise top-1 where networks overfit"):
    return next(line for table in against_paper.tables(results) for line in table.rows if line[0] == says)


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


@pytest.mark.parametrize("statement", [one for one in STATEMENTS if one.points], ids=lambda one: one.says)
def test_points_are_the_paper_s_number_or_the_difference_of_two(statement):
    stated = [float(number) for number in re.findall(r"[+-]?\d+\.?\d*", statement.number)]
    differences = [b - a for a in stated for b in stated]
    for points in statement.points:
        assert any(points == pytest.approx(one, abs=1e-6) for one in (*stated, *differences))


def test_the_figure_shows_what_was_measured_beside_what_the_paper_states():
    (claim,) = [one for one in STATEMENTS if one.says == "ghosts raise top-1 where networks overfit"]
    medium = result("medium", verdict("medium", difference=(2.0, 1.0, 3.0)))
    small = result("small", verdict("small", difference=(9.0, 8.0, 10.0)))
    theirs, ours = against_paper.figure([medium, small]).series
    assert (theirs.name, theirs.x, theirs.y) == ("the paper", [claim.says], [5.8])
    assert (ours.name, ours.x, ours.y, ours.low, ours.high) == (
        "here, medium scale, 95 % interval",
        (claim.says,),
        (2.0,),
        (1.0,),
        (3.0,),
    )
    assert against_paper.figure([]).series == []


PAGES = {scale: ROOT / "docs" / "results" / ("medium" if scale == "medium" else "") for scale in against_paper.ORDER}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the rows of docs/results come to, by experiment and scale."""
    store = Store(tmp_path_factory.mktemp("store"))
    found = {}
    for scale in against_paper.ORDER:
        saved_rows.restore(PAGES[scale], scale, store)
        found |= {(name, scale): runner.result(name, scale, store) for name in registry.names_at(scale)}
    return found


@pytest.mark.parametrize(("name", "scale"), [(name, scale) for scale in PAGES for name in registry.names_at(scale)])
def test_every_page_says_what_its_rows_come_to(name, scale, results):
    assert (PAGES[scale] / f"{name}.md").read_text() == files.markdown(results[name, scale], name)


def test_the_overview_says_what_the_rows_come_to(results, tmp_path):
    by_scale = {
        scale: [one for (_, its), one in results.items() if its == scale and one.rows] for scale in against_paper.ORDER
    }
    found = [*results.values()]
    path = overview.write(by_scale, against_paper.tables(found), against_paper.figure(found), tmp_path)
    assert path.read_text() == (ROOT / "docs" / "results" / "index.md").read_text()


@pytest.mark.parametrize("statement", [one for one in STATEMENTS if not one.untested], ids=lambda one: one.says)
def test_every_statement_has_a_claim_that_judges_it(statement, results):
    judged = [
        verdict
        for (name, scale), result in results.items()
        if name == statement.experiment
        for verdict in result.verdicts
        if all(word in verdict.claim for word in against_paper.words_of(statement, scale))
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
    assert "(#weight-decay-on-gamma-and-beta) |  | 1 | 3 | 1 |" in overview  # nothing seen, one underpowered ...
    assert (pages / "decay.md").read_text() == (ROOT / "docs" / "results" / "decay.md").read_text()
