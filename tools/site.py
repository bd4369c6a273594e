"""What mkdocs does not do by itself: pages from docstrings and from the command line, mathematics without a network.

mkdocs calls the functions whose names begin with ``on_``. Docstrings are read from the source, so that building the
site imports none of the libraries that the integrations are for.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from latex2mathml.converter import convert as to_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "betternorm"

# What is in the reference, in the order in which one meets it. Methods are listed for those with a * alone.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Advice": {
        "advice/advise": ("advise",),
        "advice/upgrade": ("upgrade",),
        "advice/ghost_size": ("tune_ghost_size",),
        "advice/diagnose": ("diagnose",),
        "advice/findings": ("Diagnosis*", "Finding"),
    },
    "Inference example weighing": {
        "weighing/search": ("tune_alpha",),
        "weighing/result": ("AlphaSearch*",),
        "weighing/comparison": ("compare_alpha",),
        "weighing/alpha": ("set_alpha", "get_alpha"),
        "weighing/calibration": ("calibrate",),
        "weighing/metrics": ("Metric",),
    },
    "Decay on gamma and beta": {"decay/groups": ("param_groups",), "decay/toward_one": ("decay_toward_one",)},
    "What a network has": {"decay/report": ("norm_report", "NormReport*", "NormLayer")},
    "Swapping layers": {"conversion/convert": ("convert", "revert", "changes")},
    "Serving": {"conversion/fold": ("fold",), "integrations/checkpoints": ("load",)},
    "Layers": {
        "layers/grouped": ("GroupedBatchNorm",),
        "layers/ghost": ("GhostBatchNorm",),
        "layers/batch_group": ("BatchGroupNorm",),
        "layers/renorm": ("BatchRenorm",),
    },
    "On tensors": {
        "functional": ("grouped_batch_norm", "weighed_batch_norm"),
    },
    "Integrations": {
        "integrations/lightning": ("BetterNorm",),
        "integrations/transformers": ("DecayWhereItActs", "TuneAlpha"),
        "integrations/models": ("load_model",),
        "integrations/checkpoints": ("load_checkpoint",),
        "integrations/torchvision": ("ready",),
    },
}


# --- what mkdocs calls ----------------------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "reference.md": reference(),
        "command-line.md": command_line(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "]("),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "]("),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = (Path(config["docs_dir"]) / page.file.src_uri).parent
    return "".join(
        text if is_code else _mathematics(_links(text, folder, Path(config["docs_dir"])))
        for text, is_code in _pieces(markdown)
    )


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    # A region that scrolls has to be reachable by keyboard.
    return content.replace("<pre>", '<pre tabindex="0">').replace("<table>", '<table tabindex="0">')


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    return _offline(output)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    return _offline(output_content)


def _offline(output: str) -> str:
    """The theme fetches what lets its search work from a disk; ours is in the page. And its search has a name."""
    own = f"<script>{(ROOT / 'tools' / 'worker.js').read_text()}</script>"
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
    return re.sub(r'<script src="https://unpkg\.com/iframe-worker[^"]*"></script>', lambda _: own, output)


# --- Markdown -------------------------------------------------------------------------------------------------------


def _pieces(markdown: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, with whether a piece is code."""
    code = r"(^```.*?^```$|^(?:    .*(?:\n|$))+|`[^`\n]+`)"
    for number, text in enumerate(re.split(code, markdown, flags=re.MULTILINE | re.DOTALL)):
        yield text, number % 2 == 1


def _mathematics(text: str) -> str:
    def display(match: re.Match[str]) -> str:
        return "\n" + to_mathml(" ".join(match[1].split()), display="block") + "\n"

    text = re.sub(r"\$\$(.+?)\$\$", display, text, flags=re.DOTALL)
    return re.sub(r"(?<![\w$])\$([^$\n]+)\$(?![\w$])", lambda match: to_mathml(match[1]), text)


def _links(text: str, folder: Path, docs: Path) -> str:
    """A link to a file of the repository that is not part of the site becomes the name of that file."""

    def replaced(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        path = (folder / target).resolve()
        if "://" in target or path.is_relative_to(docs) or not path.exists():
            return match[0]
        name = path.relative_to(ROOT)
        return f"`{name}`" if words.strip("`") in (str(name), name.name) else f"{words} (`{name}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)\)", replaced, text)


# --- the command line -----------------------------------------------------------------------------------------------


def command_line() -> str:
    from betternorm.cli.main import COMMANDS, command_parser

    os.environ["COLUMNS"] = "100"
    parts = [
        "# Command line",
        "`betternorm --help` lists the commands. Exit codes are 0 (done), 1 (a finding, such as no gain) and 2 (bad "
        "usage or input). `--json` prints for machines, `--debug` shows tracebacks. In a pipe there are no colours and "
        "no progress bars.",
    ]
    for name, command in COMMANDS.items():
        needs = f"Needs `pip install 'betternorm[{command.extra}]'`." if command.extra else "Needs torch alone."
        described = f"{command.summary[0].upper()}{command.summary[1:]}. {needs}"
        parts += [
            f"## {name}",
            described,
            f"```text\n{command_parser(name).format_help(everything=True).rstrip()}\n```",
        ]
    return "\n\n".join(parts) + "\n"


# --- the reference --------------------------------------------------------------------------------------------------


def reference() -> str:
    parts = ["# Python reference", "From the docstrings; `help(betternorm.tune_alpha)` shows the same."]
    for title, modules in SECTIONS.items():
        parts.append(f"## {title}")
        for module, names in modules.items():
            tree = ast.parse((SOURCE / f"{module}.py").read_text())
            found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            for name in names:
                parts += _entry(found[name.rstrip("*")], module, methods=name.endswith("*"))
    return "\n\n".join(parts) + "\n"


def _entry(node: ast.FunctionDef | ast.ClassDef, module: str, methods: bool) -> Iterator[str]:
    place = f"betternorm.{module.replace('/', '.')}"
    public = f'"{node.name}"' in (SOURCE / "__init__.py").read_text()
    yield f"### `{node.name}` {{ #{node.name.lower()} }}"
    yield f"```python\n{_signature(node, 'betternorm' if public else place)}\n```"
    yield docstring_to_markdown(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef) and methods:
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and ast.get_docstring(item):
                is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in item.decorator_list)
                call = "" if is_property else f"({_arguments(item)})"
                described = docstring_to_markdown(ast.get_docstring(item) or "")
                yield f'`{node.name}.{item.name}{call}`\n\n<div class="indented" markdown>\n\n{described}\n\n</div>'


def _signature(node: ast.FunctionDef | ast.ClassDef, place: str) -> str:
    function = node
    if isinstance(node, ast.ClassDef):
        made = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if not made:
            fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
            return f"{place}.{node.name}({', '.join(fields)})"
        function = made[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = _arguments(function)
    line = f"{place}.{node.name}({arguments})"
    if len(line) <= 90:
        return line
    parts = re.split(r", (?![^\[\(]*[\]\)])", arguments)
    return f"{place}.{node.name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def _arguments(function: ast.FunctionDef) -> str:
    return re.sub(r"^self(, )?", "", ast.unparse(function.args))


HEADINGS = ("Args", "Returns", "Attributes", "Shape", "Examples", "Raises")


def docstring_to_markdown(text: str) -> str:
    """Docstrings are written for `help`, in the way of torch's; this is what they look like on a page."""
    out: list[str] = []
    lines = text.split("\n")
    while lines:
        line = lines.pop(0)
        heading = re.fullmatch(rf"({'|'.join(HEADINGS)})::?", line)
        if heading:
            body = textwrap.dedent("\n".join(_take_indented(lines)))
            out += ["", f"**{heading[1]}**", ""]
            out.append(_code(body) if heading[1] == "Examples" else _definitions(body))
        elif line.strip().startswith(".. math::"):
            formula = line.strip().removeprefix(".. math::") + " ".join(_take_indented(lines))
            out += ["", f"$$ {' '.join(formula.split())} $$", ""]
        elif re.fullmatch(r"=+(  =+)+", line):
            out += ["", *_table(line, lines), ""]
        else:
            out.append(line)
    return _inline("\n".join(out))


def _take_indented(lines: list[str]) -> list[str]:
    taken: list[str] = []
    while lines and (not lines[0].strip() or lines[0].startswith("    ")):
        taken.append(lines.pop(0))
    return taken


def _code(body: str) -> str:
    return f"```python\n{body.strip()}\n```"


def _definitions(body: str) -> str:
    """``name: meaning``, continued on indented lines, as a list; other text as it is."""
    items = re.split(r"\n(?=\S)", body.strip("\n"))
    out = []
    for item in items:
        flat = " ".join(item.split())
        name = re.match(r"([\w, ]+): ", flat)
        out.append(f"- `{name[1]}`: {flat[name.end() :]}" if name else re.sub(r"^(- )?", "- ", flat))
    return "\n".join(out)


def _table(rule: str, lines: list[str]) -> Iterator[str]:
    """A table between rules of equals signs; the first row is its heading."""
    columns = [match.span() for match in re.finditer("=+", rule)]
    rows = []
    while lines:
        line = lines.pop(0)
        if re.fullmatch(r"=+(  =+)+", line):
            if len(rows) > 1:
                break
            continue
        ends = [start for start, _ in columns[1:]] + [None]
        rows.append([line[start:end].strip() for (start, _), end in zip(columns, ends, strict=True)])
    yield f"| {' | '.join(rows[0])} |"
    yield "|" + " --- |" * len(columns)
    for row in rows[1:]:
        yield f"| {' | '.join(row)} |"


def _inline(text: str) -> str:
    def role(match: re.Match[str]) -> str:
        kind, inside = match[1], match[2].lstrip("~")
        if kind == "math":
            return f"${inside}$"
        name = inside.rpartition(".")[2]
        return f"[`{name}`](#{name.lower()})" if name in _linked() else f"`{name}`"

    text = re.sub(r":(\w+):`([^`]+)`", role, text)
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _linked() -> set[str]:
    return {name.rstrip("*") for modules in SECTIONS.values() for names in modules.values() for name in names}
