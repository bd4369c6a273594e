"""The site builds in strict mode (every page in the navigation, no dead links), loads nothing from other hosts, and
is accessible.
"""

from __future__ import annotations

import csv
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 812}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_pages_come_without_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 14
    fetched = (
        r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="https?:'
    )
    for page in pages:
        assert not re.search(fetched, page.read_text()), page


def test_the_reference_documents_every_public_name(site: Path) -> None:
    import betternorm
    from betternorm import decay, errors, functional, weighing

    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    names = [f"betternorm.{name}" for name in betternorm.__all__]
    names += [f"betternorm.errors.{name}" for name, value in vars(errors).items() if isinstance(value, type)]
    documented = re.findall(r'id="(betternorm[\w.]*)"', pages)
    assert set(names) <= set(documented)
    # What other packages of the library export is documented under its short name, or under that of its package.
    short = {name.rpartition(".")[2] for name in documented}
    for module in (decay, weighing):
        assert set(module.__all__) <= short, module.__name__
    assert {"grouped_batch_norm", "weighed_batch_norm"} <= short & set(vars(functional))
    assert pages.count("<math") > 5
    for markup in (":class:", ":func:", ".. math", "===="):
        assert markup not in pages


def test_recommended_alphas_come_with_their_evidence() -> None:
    with (ROOT / "docs" / "recommended-alphas.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        assert 0 <= float(row["alpha"]) <= 1, row
        assert float(row["low"]) <= float(row["gain"]) <= float(row["high"]), row
        assert row["model"], row
        page = ROOT / "docs" / row["evidence"]
        if page.suffix == ".md":
            assert row["gain"].lstrip("-") in page.read_text(encoding="utf-8"), row
        else:
            assert row["evidence"].startswith(("betternorm ", "python ")), row


def test_pictures_of_the_methods_are_as_the_script_draws_them() -> None:
    """`python tools/figures.py` draws them again."""
    figures = runpy.run_path(str(ROOT / "tools" / "figures.py"))
    for name, draw in figures["FIGURES"].items():
        assert (ROOT / "docs" / "methods" / name).read_text(encoding="utf-8") == draw(), name


def test_the_command_line_has_a_section_for_every_command(site: Path) -> None:
    from betternorm.cli.main import COMMANDS

    page = (site / "reference" / "command-line.html").read_text()
    for name in COMMANDS:
        assert f'<h2 id="{name}"' in page


@pytest.mark.slow
class TestInABrowser:
    PAGES = (
        "index",
        "tutorials/my-data-drifts",
        "reference/alpha",
        "reference/layers",
        "reference/command-line",
        "how-it-works",
        "serving",
        "methods/ghost-batch-norm",
        "results/index",
    )

    @pytest.fixture
    def visit(self, browser: Any, site: Path) -> Any:
        """Opens a page from the disk. Console messages, errors and requests to other hosts fail the test."""
        contexts, complaints = [], []

        def opened(page: str, viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> Any:
            contexts.append(browser.new_context(viewport=viewport, color_scheme=scheme, offline=True))
            tab = contexts[-1].new_page()
            tab.on("console", lambda message: complaints.append(message.text))
            tab.on("pageerror", lambda error: complaints.append(str(error)))
            tab.on("request", lambda request: request.url.startswith("http") and complaints.append(request.url))
            tab.goto((site / f"{page}.html").as_uri())
            return tab

        yield opened
        for context in contexts:
            context.close()
        assert complaints == []

    @pytest.mark.parametrize("page", PAGES)
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_nothing_serious_is_in_the_way_of_anyone(self, visit: Any, page: str, scheme: str) -> None:
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        # Without preloading: it would fetch the stylesheets, which a browser does not let it from a disk.
        found = axe.run(visit(page, scheme=scheme), options={"preload": False}).response["violations"]
        grave = [(v["id"], v["nodes"][0]["target"]) for v in found if v["impact"] in ("serious", "critical")]
        assert grave == []

    @pytest.mark.parametrize("page", PAGES)
    def test_a_phone_scrolls_in_one_direction(self, visit: Any, page: str) -> None:
        assert visit(page, PHONE).evaluate("document.documentElement.scrollWidth") <= PHONE["width"]

    def test_search_works_from_the_disk_by_keyboard(self, visit: Any) -> None:
        tab = visit("index")
        tab.keyboard.press("/")
        tab.keyboard.type("ghost")  # lunr complains of a word of one letter, which two words would begin with
        tab.locator(".md-search-result__item").first.wait_for(timeout=30_000)
        assert "Ghost batch norm" in tab.locator(".md-search-result__list").inner_text()
