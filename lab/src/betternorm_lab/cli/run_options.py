"""Options for where and how trials run, shared by the commands that run trials."""

from __future__ import annotations

import argparse
import json
import types
import typing
from dataclasses import fields
from typing import Any

from betternorm_lab import engines
from betternorm_lab.trials import Runtime

RUNTIME = {
    "data_root": "folder of the datasets (BETTERNORM_DATA, or data)",
    "download": "download missing datasets",
    "accelerator": "cpu, gpu or auto",
    "devices": "GPUs or processes on this machine",
    "nodes": "machines",
    "threads": "torch threads per process",
    "workers": "processes that read large images",
    "channels_last": "channels_last memory format, faster on some machines",
    "compile": "with torch.compile",
    "deterministic": "use deterministic algorithms",
    "tensorboard": "write curves to the folder of the trial",
}


COMMON = ("data_root", "devices")  # the others are shown by --help-all
METAVARS = {int: "N", float: "X", str: "NAME", "data_root": "FOLDER", "finetune_from": "FILE"}


def add_arguments(group: Any, *, retry: bool) -> None:
    places = ", ".join(engines.ENGINES)
    group.add_argument(
        "--engine", choices=engines.ENGINES, default="here", metavar="NAME", help=f"where trials run: {places} (here)"
    )
    group.add_argument("--processes", type=int, metavar="N", help="for --engine processes (one per core) or ray")
    group.add_argument("--address", metavar="HOST:PORT", rare=True, help="address of a running Ray cluster")
    for item in fields(Runtime):
        if item.name in RUNTIME:
            add_field(group, item, Runtime, RUNTIME[item.name], rare=item.name not in COMMON)
    group.add_argument(
        "--retry", action=argparse.BooleanOptionalAction, default=retry, rare=True, help="run failed trials again"
    )
    group.add_argument("--config", metavar="FILE", help="options from JSON or TOML; the command line takes precedence")
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of :func:`betternorm_lab.engines.run_trials`."""
    bars = False if arguments.quiet else None
    return {
        "runtime": Runtime(**{name: getattr(arguments, name) for name in RUNTIME}, show=bars),
        "engine": arguments.engine,
        "workers": arguments.processes,
        "address": arguments.address,
        "retry": arguments.retry,
        "show": bars,
    }


def add_field(group: Any, item: Any, owner: type, meaning: str, rare: bool = False) -> None:
    """An option from a field of a dataclass: its name, type, default and help."""
    flag, kind = f"--{item.name.replace('_', '-')}", typing.get_type_hints(owner)[item.name]
    shown = " ".join(map(str, item.default)) if isinstance(item.default, tuple) else item.default
    text = (meaning if item.default is None or item.default == () else f"{meaning} ({shown})").replace("%", "%%")
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=item.default, rare=rare, help=meaning)
        return
    several = typing.get_origin(kind) is tuple
    members = [member for member in typing.get_args(kind) or (kind,) if member not in (types.NoneType, Ellipsis)]
    group.add_argument(
        flag,
        type=members[0] if len(members) == 1 else parse_value,  # for str | float: a number if it is one
        nargs="*" if several else None,
        metavar=METAVARS.get(item.name, METAVARS[members[0]]),
        default=item.default,
        rare=rare,
        help=text,
    )


def parse_value(word: str) -> Any:
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word
