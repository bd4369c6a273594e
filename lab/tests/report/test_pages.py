"""Results as Markdown, HTML and SVG: the files contain what the results contain."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from betternorm_lab.report import figures, html, markdown
from betternorm_lab.results import Figure, Outcome, Series

from betternorm.display.tables import shown

from . import examples

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("files")
    markdown.write(examples.results(), where)
    return where


def test_an_experiment_has_a_page_and_figures(folder):
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [
        "alpha.md",
        "alpha/figure-1.svg",
        "alpha/figure-2.svg",
        "decay.md",
        "decay/figure-1.svg",
        "decay/figure-2.svg",
        "ghost-size.md",
        "ghost-size/figure-1.svg",
        "index.md",
    ]


def test_the_written_paths_are_returned(tmp_path):
    written = markdown.write(examples.results()[:1], tmp_path)
    assert written[0] == tmp_path / "index.md"
    assert sorted(written) == sorted(path for path in tmp_path.rglob("*") if path.is_file())


def test_stale_figures_are_removed_and_other_files_are_kept(tmp_path):
    result = examples.results()[0]
    (tmp_path / result.name).mkdir()
    for name in ("figure-9.svg", "mine.txt"):
        (tmp_path / result.name / name).write_text("old")
    markdown.write([result], tmp_path)
    assert {path.name for path in (tmp_path / result.name).iterdir()} & {"figure-9.svg", "mine.txt"} == {"mine.txt"}


def test_the_same_results_give_the_same_bytes(folder, tmp_path):
    for path in markdown.write(examples.results()[1:2], tmp_path)[1:]:
        assert path.read_bytes() == (folder / path.relative_to(tmp_path)).read_bytes(), path


def test_the_markdown_page_has_claims_tables_and_the_command(folder):
    text = (folder / "alpha.md").read_text()
    head = "# A weight for the example at inference\n\n*Figure 1, section 3.1 · smoke scale · 3 trials*"
    assert text.startswith(head)
    assert "| A small alpha above 0 is best. | **replicated** | +3.6 [3.1, 4.1], P = 0.004, n = 3 |" in text
    assert "| network | alpha | top-1 % | gain |\n| --- | ---: | --- | ---: |" in text
    assert "![Accuracy by alpha](alpha/figure-1.svg)" in text
    assert "```sh\nbetternorm reproduce alpha --scale smoke\n```" in text
    assert "| norm_options | ghost_size=8 |" in text


def test_the_index_has_every_claim(folder):
    text = (folder / "index.md").read_text()
    for verdict in (verdict for result in examples.results() for verdict in result.verdicts):
        assert f"{verdict.claim} | **{verdict.outcome.value}** |" in text


def test_links_of_the_pages_resolve(folder):
    for path in folder.glob("*.md"):
        targets = [part.split(")")[0] for part in path.read_text().split("](")[1:]]
        assert targets
        assert all((folder / target).is_file() for target in targets)


def test_a_line_break_or_a_bar_in_a_cell_does_not_break_the_table():
    result = replace(examples.decay(), verdicts=[replace(examples.decay().verdicts[0], claim="a | b\nc")])
    assert "| a \\| b c | **opposite effect** |" in markdown.page(result, "decay")


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
def test_text_from_rows_is_not_markup(text, rendered):
    """As a Markdown renderer shows it, in notes and in tables; and the same in HTML."""
    verdict = replace(examples.decay().verdicts[0], claim=text)
    result = replace(examples.decay(), notes=text, verdicts=[verdict])
    rendered_page = pytest.importorskip("markdown").markdown(markdown.page(result, "decay"), extensions=["tables"])
    cell = f"<td>{rendered.removeprefix('<p>').removesuffix('</p>')}</td>"
    assert rendered in rendered_page
    assert cell in rendered_page
    if text.count("`") < 3:  # HTML pages know one form of code
        assert cell in html.page([result], "Results")


class Reader(HTMLParser):
    """Checks that tags are balanced, and collects ids, links and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.text = [], set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values["id"]} if "id" in values else set()
        self.links |= {values["href"]} if "href" in values else set()
        assert "src" not in values
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_html_page_has_everything_and_needs_no_other_file():
    read = Reader(html.page(examples.results(), "Results <here>"))
    assert read.open == []
    assert {link.removeprefix("#") for link in read.links if not link.startswith("http")} <= read.ids
    text = " ".join(" ".join(read.text).split())
    assert "Results <here>" in text
    for result in examples.results():
        assert result.title in text
        assert result.command in text
        for verdict in result.verdicts:
            assert verdict.claim in text
            assert verdict.outcome.value in text
        for figure in result.figures:
            assert figure.title in text  # as text in the SVG
        for table in result.tables:
            assert all(shown(cell) in text for row in table.rows for cell in row)


def test_a_figure_is_a_small_svg_with_text_as_text():
    drawn = figures.svg(examples.ghost_size().figures[0])
    assert len(drawn) < 15_000
    root = ElementTree.fromstring(drawn)
    assert root.tag == f"{SVG}svg"
    words = {element.text for element in root.iter(f"{SVG}text")}
    assert {"Validation accuracy by ghost size", "ghost size", "top-1 %", "128", "batch norm"} <= words


def test_tick_labels_keep_their_decimals():
    drawn = figures.svg(Figure("f", "x", "y", [Series("s", [0.01, 0.02, 0.03], [1.001, 1.002, 1.003])]))
    labels = {element.text for element in ElementTree.fromstring(drawn).iter(f"{SVG}text")}
    assert any(re.fullmatch(r"1\.00\d+", label or "") for label in labels)


@pytest.mark.parametrize(
    ("values", "from_zero"),
    [((95.0, 97.0), False), ((0.0, 3.0), True), ((-1.0, 3.0), True), ((-3.0, -1.0), True), ((1.0, 9.0), True)],
)
def test_bars_start_at_zero_or_are_drawn_as_points(values, from_zero):
    figure = Figure("f", "x", "y", [Series("s", ["a", "b"], values)], kind="bar")
    assert figures.starts_at_zero(figure) == from_zero
    axes = figures.draw(figure).axes[0]
    assert bool(axes.patches) == from_zero


def test_a_curve_is_drawn_through_its_points():
    axes = figures.draw(examples.ghost_size().figures[0]).axes[0]
    line = next(line for line in axes.lines if line.get_label() == "as trained")
    assert list(line.get_ydata()) == [38.0, 41.8, 44.8, 43.9, 42.0, 40.9, 39.6]
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "4", "8", "16", "32", "64", "128"]


def test_a_logarithmic_axis_includes_zero():
    axes = figures.draw(examples.alpha().figures[0]).axes[0]
    assert axes.get_xscale() == "symlog"
    assert "0" in [tick.get_text() for tick in axes.get_xticklabels()]


def test_points_of_a_category_share_a_line():
    both = [Series("paper", ["a", "b"], [5.0, 1.0]), Series("ours", ["b", "a"], [0.5, 2.0], [0.0, 1.5], [1.0, 2.5])]
    axes = figures.draw(Figure("t", "", "points", both, kind="point")).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    drawn = {line.get_label(): line for line in axes.get_lines() if line.get_label() in ("paper", "ours")}
    for series in both:
        line = drawn[series.name]
        assert list(line.get_xdata()) == series.y
        assert [names[round(y)] for y in line.get_ydata()] == series.x


def test_a_tally_counts_outcomes_in_order():
    verdicts = [verdict for result in examples.results() for verdict in result.verdicts]
    counted = markdown.tally(verdicts)
    assert counted.startswith(f"{sum(one.outcome is Outcome.REPLICATED for one in verdicts)} replicated, ")
