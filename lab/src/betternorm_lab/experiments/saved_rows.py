"""The committed tables of trials, one per scale, read back into a store so that nobody has to run them again."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from betternorm_lab.experiments.registry import names_at, trials_of
from betternorm_lab.store import DONE, Row, Store, atomic
from betternorm_lab.trials import Trial

EMPTY = ("", "NaN")
PROVENANCE = "provenance_"
NOT_SAVED = ("history", "attempts", "error")  # training curves are large, and no page uses them


def table_of(scale: str) -> str:
    """The file name of the table of a scale."""
    return f"trials-{scale}.csv.gz"


def save(rows: Iterable[Row], path: Path) -> Path:
    """Write finished rows as a compressed table, each once; the same rows give the same bytes."""
    unique = {row.key: row.flat() for row in rows if row.status == DONE}
    columns = dict.fromkeys(name for flat in unique.values() for name in flat if name not in NOT_SAVED)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *([_cell(flat.get(name)) for name in columns] for flat in unique.values())])
    with atomic(path) as draft:
        draft.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    return path


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


def restore(pages: str | os.PathLike[str], scale: str, store: Store, names: Sequence[str] | None = None) -> int:
    """Copy rows from the table of a scale in the folder ``pages`` into a store, and return how many.

    A row is copied if its key is that of a trial of the experiments: the key determines the result.
    """
    trials = (trial for name in names or names_at(scale) for arm in trials_of(name, scale).values() for trial in arm)
    return copy(Path(pages) / table_of(scale), trials, store)


def copy(path: Path, trials: Iterable[Trial], store: Store) -> int:
    """Copy the rows of some trials from a table into a store, and return how many."""
    saved, copied = read_table(path), 0
    for trial in trials:
        if trial.key in saved and store.get(trial.key) is None:
            row = saved[trial.key]
            provenance = {k.removeprefix(PROVENANCE): v for k, v in row.items() if k.startswith(PROVENANCE)}
            not_results = {"key", "kind", "status", "attempts", "error", *trial.config}
            result = {k: v for k, v in row.items() if k not in not_results and not k.startswith(PROVENANCE)}
            store.finish(trial.key, trial.kind, trial.config, result=result, provenance=provenance)
            copied += 1
    return copied


def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """The finished rows of a table by key, without empty cells. A missing file has none."""
    if not path.is_file():
        return {}
    csv.field_size_limit(sys.maxsize)
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["status"] == DONE]
    return {line["key"]: {name: _value(text) for name, text in line.items() if text not in EMPTY} for line in lines}


def _value(text: str) -> Any:
    """Numbers, booleans, lists and dicts as such; everything else is text."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
