"""The modules of the package lie in layers: what imports what, read from the source."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}


def imported_by(module: str, anywhere: bool = False) -> set[str]:
    """The modules of this package that a module imports when it is imported, or ``anywhere`` in its functions."""
    tree = ast.parse(MODULES[module].read_text())
    found: set[str] = set()
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {member if member in MODULES else str(node.module) for member in members}
    return found & set(MODULES)


def test_no_module_imports_one_that_imports_it() -> None:
    TopologicalSorter({module: imported_by(module) for module in MODULES}).prepare()  # raises where there is a circle


def test_only_commands_import_the_command_line() -> None:
    importers = {module for module in MODULES if "betternorm.cli" in imported_by(module, anywhere=True)}
    assert {module for module in importers if not module.startswith("betternorm.cli.")} == set()


def test_the_library_imports_neither_the_lab_nor_an_integration() -> None:
    rooms = ("lab", "integrations", "commands", "cli")
    library = {module for module in MODULES if module.partition("betternorm.")[2].split(".")[0] not in rooms}
    beyond = {
        (module, used)
        for module in library
        for used in imported_by(module, anywhere=True)
        if used.startswith(("betternorm_lab", "betternorm.integrations", "betternorm.cli", "betternorm.cli"))
    }
    # The package's face offers `load`; the module imports nothing but torch until a file needs more.
    assert beyond == {("betternorm", "betternorm.integrations.checkpoints")}


def test_modules_of_weighing_import_only_modules_listed_before_them() -> None:
    """The order of the table in docs/contributing/architecture.md."""
    order = [
        "scale",
        "temperature",
        "metrics",
        "batches",
        "shifts",
        "evidence",
        "alpha",
        "calibration",
        "resume",
        "evaluation",
        "folds",
        "result",
        "objective",
        "judging",
        "gradients",
        "per_layer",
        "few_layers",
        "search",
        "comparison",
        "fit_result",
        "fit",
    ]
    names = [f"betternorm.weighing.{name}" for name in order]
    assert set(names) == {module for module in MODULES if module.startswith("betternorm.weighing.")}
    for position, module in enumerate(names):
        assert imported_by(module, anywhere=True) & set(names) <= set(names[:position])
