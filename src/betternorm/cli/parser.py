"""The parser of a command: help that fits on a screen, and options from a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from betternorm.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """``--help`` shows the common options, ``--help-all`` also those added with ``add_argument(..., rare=True)``.

    ``old={"--limit": "--max-examples"}`` accepts a former name of the option, with a warning.

    ``options`` are all that were added, to the parser or to one of its groups.
    """

    def __init__(self, *arguments: Any, **details: Any) -> None:
        self.options: list[argparse.Action] = []
        self._new_names: dict[str, str] = {}
        self._rare: list[argparse.Action] = []
        super().__init__(*arguments, **details)

    def add_argument(
        self, *names: Any, rare: bool = False, old: dict[str, str] | None = None, **details: Any
    ) -> argparse.Action:
        return self._noted(super().add_argument(*names, **details), rare, old)

    def add_argument_group(self, *arguments: Any, **details: Any) -> Any:
        group = super().add_argument_group(*arguments, **details)
        add = group.add_argument

        def add_to_group(
            *names: Any, rare: bool = False, old: dict[str, str] | None = None, **details: Any
        ) -> argparse.Action:
            return self._noted(add(*names, **details), rare, old)

        group.add_argument = add_to_group  # type: ignore[method-assign]
        return group

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            if new := self._new_names.get(name):
                print(f"{self.prog}: {name} is deprecated; use {new}", file=sys.stderr)
                words[index] = f"{new}{equals}{value}"
        return super().parse_known_args(words, namespace)

    def _noted(self, action: argparse.Action, rare: bool, old: dict[str, str] | None) -> argparse.Action:
        self.options.append(action)
        self._new_names |= old or {}
        if rare:
            if not self._rare:
                self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every option, and exit")
            self._rare.append(action)
        return action

    def format_usage(self) -> str:
        self.usage = self._short_usage()
        return super().format_usage()

    def format_help(self, everything: bool = False) -> str:
        self.usage = self._short_usage()
        hidden = [] if everything else [(action, action.help) for action in self._rare]
        for action, _ in hidden:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, words in hidden:
                action.help = words

    def _short_usage(self) -> str:
        """The required arguments only."""
        words = []
        for action in self.options:
            if not action.option_strings:
                shown = str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest)
                words.append({"+": f"{shown} ...", "*": f"[{shown} ...]"}.get(str(action.nargs), shown))
            elif action.required:
                words.append(f"{action.option_strings[0]} {action.metavar or action.dest.upper()}")
        return " ".join(["%(prog)s", *words, "[options]"])


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.format_help(everything=True), end="")
        parser.exit()


def with_config(words: Sequence[str], command: str) -> list[str]:
    """The command line with the options of ``--config FILE`` inserted before all others, which override them."""
    place = list(words).index(command) + 1
    files = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    files += [file for word, file in pairwise(words) if word == "--config"]
    # --config is repeated after its options to end a list among them.
    options = [word for file in files for word in (*_options_in(Path(file)), f"--config={file}")]
    return [*words[:place], *options, *words[place:]]


def _options_in(path: Path) -> list[str]:
    """``{"norm": "ghost", "norm_options": {"ghost_size": 8}}`` as ``--norm=ghost --norm-option=ghost_size=8``."""
    settings = _read(path)
    if not isinstance(settings, dict):
        raise UserError(f'--config {path} contains no settings; expected {{"norm": "ghost", "epochs": 5}}')
    words: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, dict):  # of options that are repeated, such as --norm-option
            words += [f"{flag.removesuffix('s')}={key}={json.dumps(one)}" for key, one in value.items()]
        elif isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={value}")
    return words


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not text"
        raise UserError(f"--config {path} cannot be read: {reason}") from problem
    try:
        if path.suffix != ".toml":
            return json.loads(text)
        try:
            import tomllib
        except ImportError as problem:
            raise UserError(f"--config {path}: TOML needs Python 3.11; write the same as JSON") from problem
        return tomllib.loads(text)
    except UserError:
        raise
    except ValueError as problem:  # of both languages
        raise UserError(
            f"--config {path} is not {'TOML' if path.suffix == '.toml' else 'JSON'}: {problem}"
        ) from problem
