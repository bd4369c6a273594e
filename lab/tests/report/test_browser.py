"""The page in a real browser: it draws, it can be read off by pointer, keys and slider, on a phone, by everyone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from betternorm_lab.report import page
from betternorm_lab.results import Figure, Series

from . import examples

pytestmark = pytest.mark.slow

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 812}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return page.write(examples.results(), tmp_path_factory.mktemp("page") / "page.html", "Three experiments").as_uri()


@pytest.fixture
def visit(browser, address):
    """Opens the page; afterwards nothing may have been complained of, and nothing fetched."""
    contexts, complaints = [], []

    def opened(viewport=DESKTOP, scheme="light", **options):
        still = {"reduced_motion": "reduce", "offline": True}
        contexts.append(browser.new_context(viewport=viewport, color_scheme=scheme, **still, **options))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: request.url.startswith("http") and complaints.append(request.url))
        tab.goto(address)
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def test_every_chart_is_drawn_with_all_its_points(visit):
    tab = visit()
    assert tab.title() == "Three experiments"
    assert tab.locator(".chart").count() == tab.locator(".chart svg").count() == 5
    ghost = tab.locator("#ghost-size .chart")
    assert ghost.locator(".point").count() == 7 + 6  # one was not measured
    assert ghost.locator(".curve").count() == 3  # the gap cuts one curve in two
    assert ghost.locator(".band").count() == ghost.locator(".level").count() == 1
    points, bars = tab.locator("#decay .chart").all()
    assert points.locator(".point").count() == 5
    assert bars.locator(".bar").count() == 3


def test_a_higher_value_is_drawn_higher_and_a_longer_bar_is_more(visit):
    tab = visit()
    drawn = tab.locator("#ghost-size .chart g.s0 .point").evaluate_all("all => all.map(one => +one.getAttribute('cy'))")
    wanted = examples.ghost_size().figures[0].series[0].y
    assert sorted(range(7), key=drawn.__getitem__) == sorted(range(7), key=lambda i: -wanted[i])
    lengths = tab.locator("#decay .bar").evaluate_all("all => all.map(one => +one.getAttribute('width'))")
    assert lengths[0] == 0
    assert lengths[2] / lengths[1] == pytest.approx(0.13 / 0.3, rel=1e-3)


def test_the_slider_moves_the_numbers_by_keyboard(visit):
    tab = visit()
    slider, output = tab.get_by_label("alpha", exact=True), tab.locator("output")
    cells = tab.locator(".readings tbody td")
    assert (output.inner_text(), cells.all_inner_texts()) == ("0", ["72.14", "0.6786", "67.64", "–"])
    slider.focus()
    for _ in range(3):
        slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == output.inner_text() == "0.01"
    accuracy, loss = (figure.series for figure in examples.alpha().figures)
    between = accuracy[1].y[1] + (0.01 - 0.003) / (0.03 - 0.003) * (accuracy[1].y[2] - accuracy[1].y[1])
    assert cells.all_inner_texts() == [
        f"{accuracy[0].y[3]:.4g}",
        f"{loss[0].y[3]:.4g}",
        f"≈ {between:.4g}",
        "–",
    ]
    assert tab.locator(".between").is_visible()
    slider.press("End")
    assert output.inner_text() == "0.3"
    assert tab.locator("#alpha .pinned").count() == 2


def test_the_pointer_reads_off_a_point_with_its_interval(visit):
    tab = visit()
    plot = tab.locator("#ghost-size .plot")
    plot.scroll_into_view_if_needed()
    box = plot.locator("g.s0 .point").nth(2).bounding_box()
    tab.mouse.move(box["x"], box["y"])
    assert plot.locator(".tip").inner_text().splitlines() == [
        "ghost size 8",
        "as trained: 44.8 (44 to 45.7)",
        "alpha tuned: 46.4",
    ]
    tab.mouse.move(0, 0)
    assert plot.locator(".tip").inner_text() == ""


def test_arrow_keys_read_off_points_too(visit):
    tab = visit()
    chart = tab.locator("#decay .chart").first
    chart.focus()
    chart.press("ArrowDown")
    chart.press("ArrowDown")
    tip = tab.locator("#decay .tip").first
    assert tip.inner_text().splitlines()[0] == "gamma and beta toward 0"
    chart.press("Escape")
    assert tip.inner_text() == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways_and_in_letters_one_can_read(visit, scheme):
    tab = visit(PHONE, scheme)
    for details in tab.locator("summary").all():
        details.click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert tab.locator(".chart svg").first.bounding_box()["width"] <= PHONE["width"]
    sizes = tab.evaluate(
        "[...document.querySelectorAll('main *')].filter(one => one.textContent.trim() && one.getClientRects().length)"
        ".map(one => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 12


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(visit, axe, viewport, scheme):
    tab = visit(viewport, scheme)
    for details in tab.locator("summary").all():
        details.click()
    found = axe.run(tab)
    assert found.violations_count == 0, found.generate_report()


def test_a_window_that_is_made_narrower_keeps_the_charts_inside(visit):
    tab = visit()
    tab.set_viewport_size(PHONE)
    tab.wait_for_function("document.querySelector('.chart svg').viewBox.baseVal.width < 375")
    assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_without_the_script_everything_but_the_drawing_is_there(visit):
    tab = visit(java_script_enabled=False)
    assert tab.locator("noscript p").is_visible()
    tab.locator("#ghost-size figure summary").click()
    assert tab.locator("#ghost-size figure td", has_text="46.4").is_visible()


def test_figures_without_points_or_with_one_are_drawn_as_such(browser, tmp_path):
    one = Series("one", [32], [57.5], [56.0], [59.0])
    figures = [
        Figure("nothing", "batch size", "top-1 %", [], log_x=True, slider=True),
        Figure("no points", "alpha", "top-1 %", [Series("a", [], [])], slider=True),
        Figure("no bars", "norm", "top-1 %", [Series("a", [], [])], kind="bar"),
        Figure("one", "batch size", "top-1 %", [one], log_x=True, slider=True),
        Figure("not a number", "alpha", "loss", [Series("a", [0.0, 0.1], [math.nan, math.nan])], slider=True),
    ]
    tab = browser.new_page()
    complaints = []
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(page.write([replace(examples.decay(), figures=figures)], tmp_path / "page.html").as_uri())
    assert complaints == []
    assert tab.locator(".chart svg").count() == len(figures)
    assert "NaN" not in tab.locator("main").inner_html().replace("nan", "")
    assert tab.locator(".point").count() == tab.locator(".whisker").count() == 1
    assert tab.locator("input").count() == 2
    tab.close()
