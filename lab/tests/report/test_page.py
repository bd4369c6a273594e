"""The page's content, read from its HTML: everything is there without the script, and nothing is fetched."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from betternorm_lab.report import charts, page
from betternorm_lab.results import Figure, Series, Table

from betternorm.errors import UserError

from . import examples

VOID = {"meta", "link", "input", "br", "line"}


class Page(HTMLParser):
    """Elements with their attributes and the text inside them; complains where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {[self.elements[number][0] for number in self.open]}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))

    def handle_endtag(self, tag):
        assert self.elements[self.open[-1]][0] == tag, f"</{tag}> closes {self.elements[self.open[-1]][0]}"
        self.open.pop()

    def handle_data(self, data):
        for number in self.open:
            self.elements[number][2].append(data)

    def all(self, tag: str, **wanted: str) -> list[tuple[dict[str, str | None], str]]:
        wanted = {name.rstrip("_"): value for name, value in wanted.items()}
        return [
            (attributes, "".join(text))
            for name, attributes, text in self.elements
            if name == tag and all(value in (attributes.get(key) or "").split() for key, value in wanted.items())
        ]

    def texts(self, tag: str, **wanted: str) -> list[str]:
        return [text for _, text in self.all(tag, **wanted)]


@pytest.fixture(scope="module")
def read() -> Page:
    return Page(page.page(examples.results(), "Three experiments"))


def test_every_experiment_has_its_claims_figures_tables_and_a_place_in_the_contents(read):
    results = examples.results()
    assert read.texts("h1") == ["Three experiments"]
    assert read.texts("h2")[1:] == [result.title for result in results]
    assert read.texts("p", class_="claim") == [verdict.claim for result in results for verdict in result.verdicts]
    assert read.texts("p", class_="evidence") == [verdict.evidence for result in results for verdict in result.verdicts]
    assert read.texts("figcaption") == [figure.title for result in results for figure in result.figures]
    captions = read.texts("caption")
    assert all(table.title in captions for result in results for table in result.tables)
    links = [attributes["href"] for attributes, _ in read.all("a")]
    assert links == ["#results", "#alpha", "#ghost-size", "#decay"]


def test_badges_say_the_outcome_in_words_not_only_in_colour(read):
    assert [text.split(" ", 1)[1] for text in read.texts("span", class_="badge")] == [
        "seen",
        "underpowered",
        "seen",
        "contradicted",
    ]
    assert [" ".join(text.split()) for text in read.texts("li")[:4]] == [
        "2 seen",
        "1 contradicted",
        "0 no difference beyond the margin",
        "1 underpowered",
    ]


def test_nothing_is_loaded_from_anywhere():
    text = page.page(examples.results())
    read = Page(text)
    addresses = [
        attributes[name] for _, attributes, _ in read.elements for name in ("src", "href") if name in attributes
    ]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    for foreign in ("https:", "//cdn", "@import", "url("):
        assert foreign not in text
    assert text.replace("http://www.w3.org/2000/svg", "").count("http:") == 0


def test_every_number_of_a_figure_is_in_a_table_too(read):
    cells = read.texts("td")
    for result in examples.results():
        for figure in result.figures:
            for row in charts.numbers(figure).rows:
                assert all(page.shown(value) in cells for value in row)


def test_what_would_be_markup_is_shown_as_text(read):
    assert "narrow <small>" in read.texts("td")
    assert "A second paragraph, with <angles> & signs." in read.texts("p")
    hostile = replace(examples.decay(), title="</script><b>", notes="`code` and *stress*, 2 * 3 * 4")
    figure = Figure("f", "x", "y", [Series("</script>", [1.0], [2.0])])
    read = Page(page.page([replace(hostile, figures=[figure])]))
    assert read.texts("h2")[1:] == ["</script><b>"]
    assert read.texts("code")[0] == "code"
    assert read.texts("em") == ["stress"]
    (data,) = read.texts("script", id="data")
    (chart,) = json.loads(data)["charts"].values()
    assert chart["series"][0]["name"] == "</script>"


def test_the_data_of_a_chart_is_what_was_measured_and_a_gap_is_a_gap(read):
    (text,) = read.texts("script", id="data")
    data = json.loads(text)
    ids = {attributes["id"] for attributes, _ in read.all("div", class_="chart")}
    assert ids == set(data["charts"])
    as_trained, tuned = data["charts"]["ghost-size-panel-1-chart-1"]["series"]
    figure = examples.ghost_size().figures[0]
    assert as_trained["y"] == list(figure.series[0].y)
    assert as_trained["high"] == list(figure.series[0].high)
    assert tuned["y"][4] is None
    assert tuned["low"] is None


def test_metrics_along_one_setting_share_a_slider_with_a_label(read):
    (data,) = read.texts("script", id="data")
    assert json.loads(data)["panels"] == {
        "alpha-panel-1": {
            "positions": list(examples.ALPHAS),
            "charts": ["alpha-panel-1-chart-1", "alpha-panel-1-chart-2"],
        }
    }
    ((slider, _),) = read.all("input")
    assert (slider["type"], slider["min"], slider["max"]) == ("range", "0", "7")
    assert read.texts("label", for_=slider["id"]) == ["alpha"]


def test_the_same_metric_twice_gets_a_slider_of_its_own():
    result = examples.alpha()
    read = Page(page.page([replace(result, figures=[*result.figures, *result.figures])]))
    assert len(read.all("input")) == 2


def test_provenance_tells_what_is_shared_once_and_what_differs_for_every_trial(read):
    details = read.texts("details", class_="provenance")
    assert "betternorm reproduce alpha --scale smoke" in details[0]
    told = dict(zip(read.texts("dt"), read.texts("dd"), strict=False))
    assert told["norm_options"] == "ghost_size=8"
    assert told["versions"] == "betternorm 0.1.0, torch 2.13.0"
    assert told["commit"] == "0123456789ab"
    assert told["machine"] == "processor a slow core, cores 2, threads 1"
    for row, clock in zip(examples.rows("alpha", 3), ("1:15", "1:16", "1:17"), strict=True):
        assert row.key in details[0]
        assert clock in details[0]


def test_landmarks_headings_and_names_are_right(read):
    assert len(read.all("main")) == len(read.all("nav")) == len(read.all("h1")) == 1
    ids = [attributes["id"] for _, attributes, _ in read.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))
    for attributes, _ in [*read.all("section"), *read.all("nav")]:
        assert attributes["aria-labelledby"] in ids
    for attributes, _ in read.all("div", role="img"):
        assert attributes["aria-label"]
    levels = [int(tag[1]) for tag, _, _ in read.elements if tag in ("h1", "h2", "h3", "h4")]
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_two_scales_of_an_experiment_stand_side_by_side():
    small = replace(examples.decay(), scale="small")
    read = Page(page.page([examples.decay(), small]))
    assert [attributes["id"] for attributes, _ in read.all("section")] == ["decay-smoke", "decay-small"]
    assert read.texts("h2")[1:] == ["Decay on gamma and beta (smoke)", "Decay on gamma and beta (small)"]


def test_what_all_notes_say_alike_is_said_once_at_the_head():
    rule = "A claim is *seen* where the interval says so."
    first, second = (replace(one, notes=f"{one.name} alone\n\n{rule}") for one in (examples.alpha(), examples.decay()))
    read = Page(page.page([first, second]))
    assert [text for text in read.texts("p") if text.startswith("A claim is seen")] == [rule.replace("*", "")]
    assert rule.replace("*", "") in read.texts("header")[0]
    assert [text for text in read.texts("p") if text.endswith("alone")] == ["alpha alone", "decay alone"]
    assert rule.replace("*", "") in Page(page.page([first])).texts("section")[0]


def test_a_table_that_has_nothing_yet_says_so():
    empty = replace(examples.decay(), tables=[Table("By seed", ["seed", "top-1"], [])])
    assert "By seed: nothing has been run yet." in Page(page.page([empty])).texts("p")


def test_series_can_be_told_apart_in_both_schemes():
    for ground, scheme in (("#fbfaf7", 0), ("#ffffff", 0), ("#14171b", 1), ("#1b1f25", 1)):
        for pair in charts.COLOURS:
            assert contrast(pair[scheme], ground) >= 4.5, (pair[scheme], ground)


def contrast(first: str, second: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def test_writing_makes_the_folder_and_replaces_the_page(tmp_path):
    path = tmp_path / "new" / "page.html"
    assert page.write([], path) == path
    page.write(examples.results(), path, "Second")
    assert "<title>Second</title>" in path.read_text()
    assert [entry.name for entry in path.parent.iterdir()] == ["page.html"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        page.write([], tmp_path / "file" / "page.html")
