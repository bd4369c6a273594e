"""The files of a report: what is written, and that it says what the results say."""

from __future__ import annotations

import csv
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from betternorm_lab.report import charts, files
from betternorm_lab.results import Figure, Series

from . import examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("files")
    files.write(examples.results(), where)
    return where


def test_an_experiment_is_a_page_with_figures_tables_and_rows_beside_it(folder):
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == sorted(
        [
            "index.md",
            "alpha.md",
            *(f"alpha/{name}" for name in ("figure-1.png", "figure-1.svg", "figure-2.png", "figure-2.svg")),
            "alpha/rows.csv",
            "alpha/table-1.csv",
            "decay.md",
            *(f"decay/{name}" for name in ("figure-1.png", "figure-1.svg", "figure-2.png", "figure-2.svg")),
            "ghost-size.md",
            "ghost-size/figure-1.png",
            "ghost-size/figure-1.svg",
            "ghost-size/rows.csv",
            "ghost-size/table-1.csv",
        ]
    )


def test_what_is_returned_is_what_was_written(tmp_path):
    written = files.write(examples.results()[:1], tmp_path)
    assert written[0] == tmp_path / "index.md"
    assert sorted(written) == sorted(path for path in tmp_path.rglob("*") if path.is_file())


def test_what_an_earlier_writing_had_more_of_is_gone(tmp_path):
    result = examples.results()[0]
    (tmp_path / result.name).mkdir()
    for name in ("figure-9.svg", "table-9.csv", "mine.txt"):
        (tmp_path / result.name / name).write_text("old")
    files.write([result], tmp_path)
    assert {path.name for path in (tmp_path / result.name).iterdir()} & {"figure-9.svg", "table-9.csv", "mine.txt"} == {
        "mine.txt"
    }


def test_figures_are_pictures(folder):
    assert (folder / "alpha/figure-1.png").read_bytes().startswith(b"\x89PNG")
    root = ElementTree.parse(folder / "alpha/figure-1.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_results_give_the_same_bytes(folder, tmp_path):
    for path in files.write(examples.results()[1:2], tmp_path)[1:]:
        assert path.read_bytes() == (folder / path.relative_to(tmp_path)).read_bytes(), path


def test_the_markdown_page_says_claims_tables_and_the_command(folder):
    text = (folder / "alpha.md").read_text()
    assert text.startswith(
        "# A weight for the example at inference\n\n*Figure 1, section 3.1 · scale smoke · 3 trials*"
    )
    assert "| A small alpha above 0 is best. | **seen** | +3.6 [3.1, 4.1], P = 0.004, n = 3 |" in text
    assert "| network | alpha | top-1 % | gain |\n| --- | ---: | --- | ---: |" in text
    assert "![Accuracy by alpha](alpha/figure-1.png)" in text
    assert "```sh\nbetternorm reproduce alpha --scale smoke\n```" in text
    assert "| norm_options | ghost_size=8 |" in text


def test_the_index_has_every_claim(folder):
    text = (folder / "index.md").read_text()
    for verdict in (verdict for result in examples.results() for verdict in result.verdicts):
        assert f"{verdict.claim} | **{verdict.outcome.value}** |" in text


def test_links_of_the_pages_lead_somewhere(folder):
    for path in folder.glob("*.md"):
        targets = [part.split(")")[0] for part in path.read_text().split("](")[1:]]
        assert targets
        assert all((folder / target).is_file() for target in targets)


def test_a_table_as_csv_holds_the_cells_as_they_are(folder):
    with open(folder / "alpha/table-1.csv", newline="") as file:
        assert list(csv.reader(file)) == [
            ["network", "alpha", "top-1 %", "gain"],
            ["wide", "0.03", "73.6 ± 0.4 (n = 3)", "3.62"],
            ["narrow <small>", "0.01", "67.9 ± 0.2 (n = 3)", ""],
        ]


def test_rows_hold_configuration_result_and_provenance(folder):
    with open(folder / "alpha/rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows] == ["alpha0000", "alpha0001", "alpha0002"]
    assert [float(row["validation_top1"]) for row in rows] == [0.9, 0.91, 0.92]
    assert rows[0]["history"] == '[{"loss": 1.5}, {"loss": 0.5}]'
    assert rows[0]["provenance_duration"] == "75.0"


def test_a_line_between_bars_of_a_cell_does_not_break_the_table():
    result = replace(examples.decay(), verdicts=[replace(examples.decay().verdicts[0], claim="a | b\nc")])
    assert "| a \\| b c | **contradicted** |" in files.markdown(result, "decay")


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("<script>alert(1)</script>", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
        ("p < 0.05 & n > 3", "<p>p &lt; 0.05 &amp; n &gt; 3</p>"),
        ("a &lt;b&gt;", "<p>a &amp;lt;b&amp;gt;</p>"),
        ("`x < y` and *stress*", "<p><code>x &lt; y</code> and <em>stress</em></p>"),
        ("`<b>` and ` <i>", "<p><code>&lt;b&gt;</code> and ` &lt;i&gt;</p>"),
        ("[press](javascript:alert(1))", "<p>[press](javascript:alert(1))</p>"),
    ],
)
def test_what_comes_from_rows_is_text_in_markdown(text, rendered):
    """As a renderer of Markdown shows it, in notes and in tables."""
    verdict = replace(examples.decay().verdicts[0], claim=text)
    page = files.markdown(replace(examples.decay(), notes=text, verdicts=[verdict]), "decay")
    markdown = pytest.importorskip("markdown").markdown(page, extensions=["tables"])
    assert rendered in markdown
    assert f"<td>{rendered.removeprefix('<p>').removesuffix('</p>')}</td>" in markdown


@pytest.mark.parametrize(
    ("values", "from_zero"),
    [((95.0, 97.0), False), ((0.0, 3.0), True), ((-1.0, 3.0), True), ((-3.0, -1.0), True), ((1.0, 9.0), True)],
)
def test_bars_start_at_zero_or_are_no_bars(values, from_zero):
    figure = Figure("f", "x", "y", [Series("s", ["a", "b"], values)], kind="bar")
    assert charts.starts_at_zero(figure) == from_zero
    axes = files.draw(figure).axes[0]
    assert bool(axes.patches) == from_zero


def test_a_curve_is_drawn_where_it_was_measured():
    axes = files.draw(examples.ghost_size().figures[0]).axes[0]
    line = next(line for line in axes.lines if line.get_label() == "as trained")
    assert list(line.get_ydata()) == [38.0, 41.8, 44.8, 43.9, 42.0, 40.9, 39.6]
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "4", "8", "16", "32", "64", "128"]


def test_zero_has_a_place_on_a_logarithmic_axis():
    axes = files.draw(examples.alpha().figures[0]).axes[0]
    assert axes.get_xscale() == "symlog"
    assert "0" in [tick.get_text() for tick in axes.get_xticklabels()]


def test_points_of_a_name_share_a_line():
    both = [Series("theirs", ["a", "b"], [5.0, 1.0]), Series("ours", ["b", "a"], [0.5, 2.0], [0.0, 1.5], [1.0, 2.5])]
    axes = files.draw(Figure("t", "", "points", both, kind="point")).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    drawn = {line.get_label(): line for line in axes.get_lines() if line.get_label() in ("theirs", "ours")}
    for series in both:
        line = drawn[series.name]
        assert list(line.get_xdata()) == series.y
        assert [names[round(y)] for y in line.get_ydata()] == series.x
