"""Where the runs of Round 3 read and write, and the rule that a protocol is committed before a test set is read."""

from __future__ import annotations

import csv
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from betternorm.errors import UserError
from betternorm_lab.trials import code_version


@dataclass(frozen=True)
class Places:
    """Folders: datasets (NAME.npz), pretrained weights, unfinished work (large), and the committed rows."""

    data: Path
    weights: Path
    work: Path
    out: Path


def require_committed() -> str:
    """The commit that the rows of a run name. A run from changed code would hide what was decided when."""
    commit = code_version()
    if commit is None or commit.endswith("+"):
        raise UserError("the code has uncommitted changes; commit the protocol and the code before reading a test set")
    return commit


def committed_text(commit: str, path: str) -> str:
    """A file of the repository as it was at a commit."""
    here = Path(__file__).parent
    top = subprocess.run(["git", "rev-parse", "--show-toplevel"], cwd=here, capture_output=True, text=True, check=True)
    shown = subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=top.stdout.strip(), capture_output=True, text=True, check=True
    )
    return shown.stdout


def write_selection(places: Places, name: str, table: list[dict[str, Any]]) -> None:
    """The validation results that hyperparameters are chosen from."""
    path = places.out / "selection" / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
