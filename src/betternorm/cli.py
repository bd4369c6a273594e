"""The command line: one parser, one function for each command, no logic of its own.

A command is a module with ``add_arguments(parser)`` and ``run(arguments) -> int``; it is imported when it is called, so
that ``betternorm --help`` needs nothing but torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from betternorm import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    # name: (module, one line of help)
    "inspect": ("betternorm.commands.inspect", "the norm layers of a model, and what would help each"),
    "train": ("betternorm.commands.train", "train a network with any normalisation, resumable, and tune alpha"),
}

# What a command returns to the shell.
OK, FINDING, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class UserError(Exception):
    """Bad usage or input: shown as one line, exit code 2, no traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="betternorm", description="Four improvements to batch normalisation.")
    parser.add_argument("--version", action="version", version=f"betternorm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in words:
            importlib.import_module(module).add_arguments(command)
    parsed = parser.parse_args(words)
    try:
        status: int = importlib.import_module(COMMANDS[parsed.command][0]).run(parsed)
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (UserError, ImportError) as error:
        if parsed.debug:
            raise
        print(f"betternorm {parsed.command}: {error}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
