"""Where and how trials run: the options that the commands which run trials have in common."""

from __future__ import annotations

import argparse
import json
import types
import typing
from dataclasses import fields
from typing import Any

from betternorm.lab import engines
from betternorm.lab.trials import Runtime

RUNTIME = {
    "data_root": "folder of the datasets (BETTERNORM_DATA, or data)",
    "download": "fetch a dataset that is missing",
    "accelerator": "cpu, gpu or auto",
    "devices": "GPUs or processes on this machine",
    "nodes": "machines",
    "threads": "of torch in each process",
    "workers": "processes that read large images",
    "channels_last": "memory format, faster on some machines",
    "compile": "with torch.compile",
    "deterministic": "the same bits each time",
    "tensorboard": "write curves into the trial's folder",
}


def add_arguments(group: Any, *, retry: bool) -> None:
    for item in fields(Runtime):
        if item.name in RUNTIME:
            add_field(group, item, Runtime, RUNTIME[item.name])
    group.add_argument("--engine", choices=engines.ENGINES, default="here", help="where trials run (here)")
    group.add_argument("--processes", type=int, help="of --engine processes, or of a Ray started here")
    group.add_argument("--address", help="of a running Ray cluster")
    group.add_argument("--retry", action=argparse.BooleanOptionalAction, default=retry, help="run what failed again")
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What :func:`betternorm.lab.engines.run_trials` takes besides trials and a folder."""
    bars = False if arguments.quiet else None
    return {
        "runtime": Runtime(**{name: getattr(arguments, name) for name in RUNTIME}, show=bars),
        "engine": arguments.engine,
        "workers": arguments.processes,
        "address": arguments.address,
        "retry": arguments.retry,
        "show": bars,
    }


def add_field(group: Any, item: Any, owner: type, meaning: str) -> None:
    """An option from a field of a dataclass: its name, type, default and help."""
    flag, kind = f"--{item.name.replace('_', '-')}", typing.get_type_hints(owner)[item.name]
    shown = " ".join(map(str, item.default)) if isinstance(item.default, tuple) else item.default
    text = (meaning if item.default is None or item.default == () else f"{meaning} ({shown})").replace("%", "%%")
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=item.default, help=meaning)
    elif typing.get_origin(kind) is tuple:
        group.add_argument(flag, type=typing.get_args(kind)[0], nargs="*", default=item.default, help=text)
    else:
        group.add_argument(flag, type=_reader(kind), default=item.default, help=text)


def _reader(kind: Any) -> Any:
    """What turns a word into a value of this type; of str | float, a number where it is one."""
    if not isinstance(kind, types.UnionType):
        return kind
    members = [member for member in typing.get_args(kind) if member is not types.NoneType]
    return members[0] if len(members) == 1 else parse_value


def parse_value(word: str) -> Any:
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word
