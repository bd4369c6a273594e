"""The paper's statements: each has one verdict, found by the id of its claim; and the pages follow from the rows."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from betternorm_lab.experiments import against_paper, paper, registry, runner, saved_rows
from betternorm_lab.report import markdown, overview
from betternorm_lab.results import Outcome, Result, Verdict
from betternorm_lab.store import Store

from betternorm.cli.main import main

PAGES = Path(__file__).parents[3] / "docs" / "results"
STATEMENTS = [one for group in paper.STATEMENTS.values() for one in group]
TESTED = [one for one in STATEMENTS if not one.untested]
GHOSTS = next(one for one in STATEMENTS if one.id == "ghosts-overfitting")


def result(scale, *verdicts, name="ghost-size"):
    return Result(name, "title", "place", scale, "command", [], [], verdicts, [])


def row(results, statement=GHOSTS):
    return next(line for table in against_paper.tables(results) for line in table.rows if line[0] == statement.says)


def verdict(scale, outcome=Outcome.REPLICATED, **details):
    id = GHOSTS.claims[scale]
    return Verdict("any words", outcome, "", id=id, measured=f"+1 {scale}", detectable=0.5, **details)


def test_the_medium_scale_has_precedence_over_the_small_one():
    medium, small = (result(scale, verdict(scale)) for scale in ("medium", "small"))
    assert row([small, medium])[3] == "+1 medium, medium"
    assert row([small])[3] == "+1 small, small"
    assert row([])[-1] == "**not tested**"


def test_a_claim_that_was_not_tested_leaves_the_statement_to_the_other_scale():
    medium = result("medium", verdict("medium", Outcome.NOT_TESTED))
    assert row([medium])[-1] == "**not tested**"
    assert row([medium, result("small", verdict("small"))])[3] == "+1 small, small"


def test_a_verdict_is_looked_up_by_id_alone():
    other = replace(verdict("medium", Outcome.OPPOSITE), id="something/else", claim=GHOSTS.says)
    reworded = replace(verdict("medium"), claim="in other words")
    assert row([result("medium", other, reworded)])[-1] == "**replicated**"
    assert row([result("medium", other)])[-1] == "**not tested**"


def test_what_is_not_tested_has_a_reason():
    (svhn,) = [one for one in STATEMENTS if one.untested]
    assert row([], svhn)[-2:] == ["no runs on SVHN", "**not tested**"]


@pytest.mark.parametrize(("difference", "contains"), [((4.0, 2.0, 6.0), "yes"), ((2.0, 1.0, 3.0), "no")])
def test_the_table_says_whether_the_papers_value_is_in_our_interval(difference, contains):
    assert row([result("medium", verdict("medium", difference=difference))])[4] == contains


@pytest.mark.parametrize("statement", [one for one in STATEMENTS if one.points], ids=lambda one: one.id)
def test_points_are_the_papers_number_or_the_difference_of_two(statement):
    stated = [float(number) for number in re.findall(r"[+-]?\d+\.?\d*", statement.number)]
    differences = [b - a for a in stated for b in stated]
    for points in statement.points:
        assert any(points == pytest.approx(one, abs=1e-6) for one in (*stated, *differences))


def test_the_figure_has_the_papers_numbers_and_ours():
    medium = result("medium", verdict("medium", difference=(2.0, 1.0, 3.0)))
    small = result("small", verdict("small", difference=(9.0, 8.0, 10.0)))
    theirs, ours = against_paper.figure([medium, small]).series
    assert (theirs.name, theirs.x, theirs.y) == ("paper", [GHOSTS.says], [5.8])
    assert (ours.x, ours.y, ours.low, ours.high) == ((GHOSTS.says,), (2.0,), (1.0,), (3.0,))
    assert "medium scale" in ours.name
    assert against_paper.figure([]).series == []


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of the committed rows, by experiment and scale."""
    store = Store(tmp_path_factory.mktemp("store"))
    for scale in paper.SCALES:
        saved_rows.restore(PAGES, scale, store)
    return {
        (name, scale): runner.result(name, scale, store) for scale in paper.SCALES for name in registry.names_at(scale)
    }


EVERY = [(name, scale) for scale in paper.SCALES for name in registry.names_at(scale)]


def test_statements_and_claims_have_unique_ids(results):
    ids = [one.id for one in STATEMENTS]
    assert len(set(ids)) == len(ids)
    for one in results.values():
        ids = [verdict.id for verdict in one.verdicts]
        assert all(ids)
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("statement", TESTED, ids=lambda one: one.id)
def test_every_statement_has_its_claims(statement, results):
    for scale, claim in statement.claims.items():
        assert claim in {verdict.id for verdict in results[statement.experiment, scale].verdicts}
    assert against_paper.verdict_on(statement, [*results.values()]) is not None


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_every_page_follows_from_its_rows(name, scale, results):
    folder = overview.FOLDERS[scale]
    data = f"{'../' if folder else ''}{saved_rows.table_of(scale)}"
    assert (PAGES / folder / f"{name}.md").read_text() == markdown.page(results[name, scale], name, data)


def test_the_overview_follows_from_the_rows(results, tmp_path):
    if (PAGES / "evidence").is_dir():
        shutil.copytree(PAGES / "evidence", tmp_path / "evidence")
    overview.write([one for one in results.values() if one.rows], tmp_path)
    for name in ("index.md", overview.STATEMENTS):
        assert (tmp_path / name).read_text() == (PAGES / name).read_text()


def test_the_index_quotes_the_primary_claims_of_the_evidence_page(tmp_path):
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence/index.md").write_text(
        "# E\n\nText.\n\n| a |\n| --- |\n| [b](b.md), [c](https://d) |\n\n| x |\n"
    )
    overview.write([], tmp_path)
    quoted = "| a |\n| --- |\n| [b](evidence/b.md), [c](https://d) |"
    assert f"## Primary claims\n\n{quoted}\n\n## Pages" in (tmp_path / "index.md").read_text()


def test_pages_are_recomputed_without_running_anything(results, tmp_path, capsys):
    """The command behind every number of the results."""
    pages = tmp_path / "pages"
    pages.mkdir()
    saved_rows.save(results["decay", "small"].rows, pages / saved_rows.table_of("small"))
    before = (pages / saved_rows.table_of("small")).read_bytes()
    words = ["decay", "--scale", "small", "--rows-only", "--pages", str(pages), "--folder", str(tmp_path / "store")]
    assert main(["reproduce", *words, "--quiet"]) == 0
    assert "INCONCLUSIVE: pre-activation network: decay on gamma and beta raises" in capsys.readouterr().out
    assert (pages / "decay.md").read_text() == (PAGES / "decay.md").read_text()
    assert (pages / saved_rows.table_of("small")).read_bytes() == before
