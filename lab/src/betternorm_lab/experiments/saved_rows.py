"""Rows that were published with the pages of results, read back into a store, so that nobody has to run them again."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from betternorm_lab.experiments.registry import names_at, trials_of
from betternorm_lab.store import DONE, Store
from betternorm_lab.trials import Trial

EMPTY = ("", "NaN")  # what a table says where a trial has no such column


def restore(pages: str | os.PathLike[str], scale: str, store: Store, names: Sequence[str] | None = None) -> int:
    """Take finished rows from the pages of results (``NAME/rows.csv``) into a store, and return how many.

    A row is taken where its key is that of a trial: it says what was run, so the row is what running it would give.
    """
    return sum(
        take(
            Path(pages) / name / "rows.csv", (trial for arm in trials_of(name, scale).values() for trial in arm), store
        )
        for name in names or names_at(scale)
    )


def take(path: Path, trials: Iterable[Trial], store: Store) -> int:
    """Take the finished rows of some trials from a file into a store, and return how many."""
    saved, taken = read_csv(path), 0
    for trial in trials:
        if trial.key in saved and store.get(trial.key) is None:
            columns = saved[trial.key]
            prefix = "provenance_"
            provenance = {k.removeprefix(prefix): v for k, v in columns.items() if k.startswith(prefix)}
            known = {"key", "kind", "status", "attempts", "error", *trial.config}
            result = {k: v for k, v in columns.items() if k not in known and not k.startswith(prefix)}
            store.finish(trial.key, trial.kind, trial.config, result=result, provenance=provenance)
            taken += 1
    return taken


def read_csv(path: Path) -> dict[str, dict[str, Any]]:
    """The finished rows of a file that :func:`betternorm_lab.store.export` wrote, by key, without empty cells."""
    if not path.is_file():
        return {}
    csv.field_size_limit(sys.maxsize)
    with open(path, newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["status"] == DONE]
    return {line["key"]: {name: _value(text) for name, text in line.items() if text not in EMPTY} for line in lines}


def _value(text: str) -> Any:
    """Numbers, truths, lists and dicts as what they were; everything else is text."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
