"""Hooks for mkdocs: generated pages, patterns in the navigation, formulas as MathML, no requests to other hosts."""

from __future__ import annotations

import base64
import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert as to_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


# --- Hooks that mkdocs calls ----------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace patterns such as ``results/*.md`` in the navigation by the pages that it does not list itself."""
    listed = set(_listed(config["nav"]))
    config["nav"] = _expanded(config["nav"], listed, Path(config["docs_dir"]))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "reference/command-line.md": command_line(),
        "recommended-alphas.md": recommended_alphas(ROOT / "docs" / "recommended-alphas.csv"),
        "development/changelog.md": (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](../"),
        "development/contributing.md": (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "](../"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for notebook in sorted(Path(config["docs_dir"]).glob("tutorials/*.ipynb")):
        files.append(File.generated(config, f"tutorials/{notebook.stem}.png", content=picture(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = (Path(config["docs_dir"]) / page.file.src_uri).parent
    return "".join(
        text if is_code else _formulas(_links(text, folder, Path(config["docs_dir"])))
        for text, is_code in _pieces(markdown)
    )


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    # Keyboard users can only scroll regions that take the focus.
    return content.replace("<pre>", '<pre tabindex="0">').replace("<table>", '<table tabindex="0">')


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    return _offline(output)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    return _offline(output_content)


# --- Navigation -----------------------------------------------------------------------------------------------------


def _listed(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _listed(item)


def _expanded(nav: Any, listed: set[str], docs: Path) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(item, listed, docs) for title, item in nav.items()}
    if not isinstance(nav, list):
        return nav
    items: list[Any] = []
    for item in nav:
        if isinstance(item, str) and "*" in item:
            found = sorted({path.relative_to(docs).as_posix() for path in docs.glob(item)})
            items += [page for page in found if page not in listed]
        else:
            items.append(_expanded(item, listed, docs))
    return items


# --- Pages ----------------------------------------------------------------------------------------------------------


def _offline(output: str) -> str:
    """Remove what the theme and the notebooks' template load from other hosts."""
    worker = f"<script>{(ROOT / 'tools' / 'worker.js').read_text()}</script>"
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
    output = re.sub(r'<script src="https://unpkg\.com/iframe-worker[^"]*"></script>', lambda _: worker, output)
    return re.sub(r'<script[^>]* src="https://[^"]*"[^>]*></script>', "", output)


def _pieces(markdown: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, with whether a piece is code."""
    code = r"(^```.*?^```$|^(?:    .*(?:\n|$))+|`[^`\n]+`)"
    for number, text in enumerate(re.split(code, markdown, flags=re.MULTILINE | re.DOTALL)):
        yield text, number % 2 == 1


def _formulas(text: str) -> str:
    def display(match: re.Match[str]) -> str:
        return "\n" + to_mathml(" ".join(match[1].split()), display="block") + "\n"

    text = re.sub(r"\$\$(.+?)\$\$", display, text, flags=re.DOTALL)
    return re.sub(r"(?<![\w$])\$([^$\n]+)\$(?![\w$])", lambda match: to_mathml(match[1]), text)


def _links(text: str, folder: Path, docs: Path) -> str:
    """Replace a link to a file of the repository that is not part of the site by the name of that file."""

    def replaced(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        path = (folder / target).resolve()
        if "://" in target or path.is_relative_to(docs) or not path.exists():
            return match[0]
        name = path.relative_to(ROOT)
        return f"`{name}`" if words.strip("`") in (str(name), name.name) else f"{words} (`{name}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)\)", replaced, text)


def picture(notebook: Path) -> bytes:
    """The last figure that a notebook draws."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return base64.b64decode(
        [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})][-1]
    )


def recommended_alphas(path: Path) -> str:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return (
        "# Recommended alphas\n\nMeasured alphas, as starting points for similar models. The gain is in points for "
        "`top1` and in nats for losses (lower is better), with its 95 % interval. Choose alpha for your own model with "
        "[`tune_alpha`][betternorm.tune_alpha]. To add a row, edit `docs/recommended-alphas.csv` and give the page or "
        "the command with the evidence.\n\n"
        "| model | data | objective | alpha | gain | 95 % interval | evidence |\n"
        "| --- | --- | --- | ---: | ---: | --- | --- |\n" + "".join(_row(row) for row in rows)
    )


def _row(row: dict[str, str]) -> str:
    evidence = f"[results]({row['evidence']})" if row["evidence"].endswith(".md") else f"`{row['evidence']}`"
    interval = f"{row['low']} to {row['high']}"
    cells = [row[name] for name in ("model", "data", "objective", "alpha", "gain")]
    return f"| {' | '.join([*cells, interval, evidence])} |\n"


def command_line() -> str:
    from betternorm.cli.main import COMMANDS, command_parser

    os.environ["COLUMNS"] = "100"
    parts = [
        "# Command line",
        "`betternorm --help` lists the commands. Exit codes: 0 on success, 1 for a negative finding such as no "
        "significant gain, 2 for invalid usage or input. `--json` prints machine-readable output and `--debug` shows "
        "tracebacks. Colors and progress bars are disabled when the output is not a terminal.",
    ]
    for name, command in COMMANDS.items():
        extra = f" Requires `pip install 'betternorm[{command.extra}]'`." if command.extra else ""
        parts += [
            f"## {name}",
            f"{command.summary[0].upper()}{command.summary[1:]}.{extra}",
            f"```text\n{command_parser(name).format_help(everything=True).rstrip()}\n```",
        ]
    return "\n\n".join(parts) + "\n"
