"""Where the numbers of a result came from."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from betternorm.display.progress import clock
from betternorm.display.tables import shown
from betternorm_lab.results import Table
from betternorm_lab.store import Row


def settings_of(rows: Sequence[Row]) -> tuple[dict[str, str], Table]:
    """Where the numbers came from: what is the same for all trials, and a row for each with what is not.

    Configuration, seed, versions, commit, machine, duration and command are told for every trial, and its numbers.
    """
    told = [_settings(row) for row in rows]
    columns = list(dict.fromkeys(name for settings in told for name in settings))
    same = {
        name: told[0][name]
        for name in columns
        if len(rows) > 1 and all(settings.get(name) == told[0].get(name) for settings in told)
    }
    different = [name for name in columns if name not in same]
    results = list(dict.fromkeys(name for row in rows for name, value in row.result.items() if _is_scalar(value)))
    table = Table(
        "Trials",
        ["trial", *different, *results],
        [
            [row.key, *(settings.get(name) for name in different), *(row.result.get(name) for name in results)]
            for row, settings in zip(rows, told, strict=True)
        ],
    )
    return same, table


def _settings(row: Row) -> dict[str, str]:
    source = row.provenance
    machine = dict(source.get("machine") or {})
    versions = source.get("versions") or {}
    command = [str(word) for word in source.get("command") or ()]
    told = {name: _value(value) for name, value in row.config.items()}
    told |= {
        "commit": (source.get("commit") or "")[:12],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "machine": ", ".join(f"{name} {_value(value)}" for name, value in machine.items() if value),
        "duration": clock(source["duration"]) if "duration" in source else "",
        "run by": shlex.join([Path(command[0]).name, *command[1:]]) if command else "",
    }
    return {name: text for name, text in told.items() if text}


def _value(value: Any) -> str:
    """A setting as one word or a few: ``ghost_size=8`` for a frozen dict, ``1, 1, 1`` for a list."""
    if isinstance(value, list | tuple):
        pairs = all(isinstance(item, list | tuple) and len(item) == 2 for item in value)
        return ", ".join(f"{item[0]}={_value(item[1])}" if pairs else _value(item) for item in value)
    return str(value) if isinstance(value, bool) else shown(value)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
