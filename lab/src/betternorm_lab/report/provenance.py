"""Where the numbers of a result come from: configuration, versions, commit, machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from betternorm.display.tables import shown
from betternorm_lab.store import Row


def shared_settings(rows: Sequence[Row]) -> dict[str, str]:
    """The settings that all rows have in common; empty for a single row."""
    settings = [_settings(row) for row in rows]
    if len(settings) < 2:
        return {}
    names = dict.fromkeys(name for one in settings for name in one)
    return {
        name: settings[0][name]
        for name in names
        if all(one.get(name) == settings[0].get(name) is not None for one in settings)
    }


def _settings(row: Row) -> dict[str, str]:
    source = row.provenance
    command = [str(word) for word in source.get("command") or ()]
    settings = {name: _text(value) for name, value in row.config.items()}
    settings |= {
        "commit": (source.get("commit") or "")[:12],
        "versions": ", ".join(
            f"{name} {version}" for name, version in (source.get("versions") or {}).items() if version
        ),
        "machine": ", ".join(
            f"{name} {_text(value)}" for name, value in (source.get("machine") or {}).items() if value
        ),
        "command": shlex.join([Path(command[0]).name, *command[1:]]) if command else "",
    }
    return {name: text for name, text in settings.items() if text}


def _text(value: Any) -> str:
    """A setting in a word or two: ``ghost_size=8`` for a frozen dict, ``1, 1, 1`` for a list."""
    if isinstance(value, list | tuple):
        pairs = all(isinstance(item, list | tuple) and len(item) == 2 for item in value)
        return ", ".join(f"{item[0]}={_text(item[1])}" if pairs else _text(item) for item in value)
    return str(value) if isinstance(value, bool) else shown(value)
