"""Private names of torch and of the standard library: each is on the contributors' page, with its reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from torch import nn

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "betternorm"
# Begin with an underscore so as not to clash, and are documented: of namedtuples, and os._exit.
PUBLIC = {"_fields", "_replace", "_asdict", "_exit"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.AST) -> set[str]:
    """What a module defines: functions, classes, variables, arguments, and attributes of its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def used_names(tree: ast.AST) -> set[str]:
    """Attributes that are read, methods that are overridden, and what is imported from others."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            found |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("betternorm"):
            found |= {alias.name for alias in node.names} | set((node.module or "").split("."))
    return found


def test_each_is_on_the_contributors_page() -> None:
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    own = set().union(*map(own_names, trees)) - set(dir(nn.SyncBatchNorm(1)))  # a name of torch's stays torch's
    used = {name for tree in trees for name in used_names(tree) if is_private(name)} - own - PUBLIC
    page = (ROOT / "CONTRIBUTING.md").read_text()
    listed = set(re.findall(r"\b_\w+", page[page.index("## Private names") :]))
    assert {"_BatchNorm", "_buffers", "_getframe"} <= used, "the search itself"
    assert used - listed == set(), "list them in CONTRIBUTING.md, or do without"
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert {name for name in listed if name not in text} == set(), "gone from the source; take them off CONTRIBUTING.md"
