"""The command line: one parser and one function per command.

A command is a module with ``add_arguments(parser)`` and ``run(arguments) -> int``. It is imported when it is called, so
that ``betternorm --help`` needs torch only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from betternorm import __version__
from betternorm.cli import BAD_INPUT, INTERRUPTED, PIPE_CLOSED, TERMINATED
from betternorm.cli.parser import CommandParser, with_config
from betternorm.display.terminal import paint
from betternorm.errors import UserError


@dataclass(frozen=True)
class Command:
    """A command: its module, a one-line summary, the extra of this package it needs, and whether it can be resumed."""

    module: str
    summary: str
    extra: str = ""
    resumes: bool = False

    @property
    def help(self) -> str:
        return f"{self.summary} [{self.extra}]" if self.extra else self.summary


LIBRARY_COMMANDS: dict[str, Command] = {
    "inspect": Command("betternorm.cli.inspect", "norm layers of a model, and recommendations"),
    "diagnose": Command("betternorm.cli.diagnose", "what is wrong with the norm layers of a trained model"),
    "tune": Command("betternorm.cli.tune", "choose alpha for a pretrained model on labeled images", resumes=True),
    "fit": Command("betternorm.cli.fit", "make a model robust with a few hundred unlabeled images", resumes=True),
    "completion": Command("betternorm.cli.completion", "shell completion for commands and options"),
}
LAB = "betternorm-lab"
# Commands of betternorm-lab, so that their names are recognized where the lab is not installed.
LAB_COMMANDS = ("demo", "train", "reproduce", "report")


def _discovered() -> dict[str, Command]:
    """The commands of this package, and those that installed packages register as entry points."""
    commands = dict(LIBRARY_COMMANDS)
    for entry in entry_points(group="betternorm.commands"):
        commands |= entry.load()
    return commands


COMMANDS = _discovered()

EPILOG = """\
commands:
{commands}

A command marked [lab] or [integrations] needs more than torch:
  pip install 'betternorm[lab]'      brings both

`betternorm COMMAND --help` shows options and examples. Exit codes: 0 done,
1 a finding (no gain, a run that failed), 2 bad usage or input.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    called = next((word for word in words if not word.startswith("-")), "")
    debug = "--debug" in words
    signals: list[int] = []
    try:
        if called in LAB_COMMANDS and called not in COMMANDS:
            raise UserError(f"this command is part of {LAB}, which is not installed: pip install 'betternorm[lab]'")
        if called in COMMANDS and any(word.partition("=")[0] == "--config" for word in words):
            words = with_config(words, called)
        parsed = build_parser({called}).parse_args(words)
        with _orderly_termination(signals):
            status: int = importlib.import_module(COMMANDS[called].module).run(parsed)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        resumes = "; run the same command again to continue" if called in COMMANDS and COMMANDS[called].resumes else ""
        print(f"{'terminated' if signals else 'interrupted'}{resumes}", file=sys.stderr)
        return TERMINATED if signals else INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # avoids an error at exit
        return PIPE_CLOSED
    except Exception as error:
        if debug:
            raise
        print(f"{paint(f'betternorm {called}:', 'red', sys.stderr)} {_one_line(error, called)}", file=sys.stderr)
        return BAD_INPUT


@contextlib.contextmanager
def _orderly_termination(received: list[int]) -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C: subprocesses are stopped, and no file is left half written."""
    if threading.current_thread() is not threading.main_thread():  # signal handlers need the main thread
        yield
        return

    def end(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt  # which no library catches

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def build_parser(with_options: Collection[str] = ()) -> argparse.ArgumentParser:
    """The parser, with the options of these commands; only their modules are imported."""
    parser = argparse.ArgumentParser(
        prog="betternorm",
        description="Four improvements to batch normalization, for any PyTorch model.",
        epilog=EPILOG.format(commands=_listed()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"betternorm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, help="see below", parser_class=CommandParser
    )
    for name in COMMANDS:
        command_parser(name, commands.add_parser(name), name in with_options)
    return parser


def command_parser(name: str, parser: CommandParser | None = None, with_options: bool = True) -> CommandParser:
    """The parser of one command."""
    parser = parser or CommandParser(f"betternorm {name}")
    command = COMMANDS[name]
    parser.description = command.help
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    if with_options:
        importlib.import_module(command.module).add_arguments(parser)
    return parser


def _listed() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())


def _one_line(error: Exception, called: str) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("betternorm"):
        extra = COMMANDS[called].extra or "integrations"
        return f"needs {error.name.partition('.')[0]}, which is not installed: pip install 'betternorm[{extra}]'"
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return first if isinstance(error, ImportError) else f"{type(error).__name__}: {first} (--debug shows where)"
