"""``betternorm completion``: a script that completes commands, options and their values in bash, zsh or fish.

It is generated from the parsers and contains all words, so that completing does not start Python.
"""

from __future__ import annotations

import argparse
import contextlib

from betternorm.cli import OK
from betternorm.cli.main import COMMANDS, command_parser

EXAMPLES = """\
examples:
  eval "$(betternorm completion bash)"      permanently: in ~/.bashrc
  eval "$(betternorm completion zsh)"       in ~/.zshrc, after compinit
  betternorm completion fish | source       in ~/.config/fish/config.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=sorted(_WRITERS), help="the shell to write a script for")


def run(arguments: argparse.Namespace) -> int:
    print(_WRITERS[arguments.shell](_options()), end="")
    return OK


# For each command the words that may follow it, and for options with choices their values.
Options = dict[str, dict[str, list[str]]]


def _options() -> Options:
    """The options of every command. Only the name is completed if the libraries of a command are not installed."""
    options: Options = {}
    for name in COMMANDS:
        taken: dict[str, list[str]] = {"--help": []}
        with contextlib.suppress(ImportError):
            for action in command_parser(name).options:
                choices = [str(choice) for choice in action.choices or ()]
                if not action.option_strings:
                    taken |= {choice: [] for choice in choices}
                elif action.help != argparse.SUPPRESS:
                    taken |= {word: choices for word in action.option_strings if word.startswith("--")}
        options[name] = taken
    return options


def _bash(options: Options) -> str:
    cases = "\n".join(f'        {name}) words="{" ".join(taken)}" ;;' for name, taken in options.items())
    values = "\n".join(
        f'        "{name} {word}") words="{" ".join(choices)}" ;;'
        for name, taken in options.items()
        for word, choices in taken.items()
        if choices
    )
    return f"""\
_betternorm() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="" word words
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$word" in -*) ;; *) command="$word"; break ;; esac
    done
    case "$command" in
        "") words="{" ".join(COMMANDS)} --help --version --debug" ;;
{cases}
        *) words="" ;;
    esac
    case "$command $before" in
{values}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _betternorm betternorm
"""


def _zsh(options: Options) -> str:
    # zsh runs completions that were written for bash.
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(options)


def _fish(options: Options) -> str:
    lines = ["complete -c betternorm -f -n __fish_use_subcommand -l help", "complete -c betternorm -l debug"]
    for name, taken in options.items():
        summary = COMMANDS[name].help.replace("'", "\\'")
        lines.append(f"complete -c betternorm -f -n __fish_use_subcommand -a {name} -d '{summary}'")
        inside = f"-n '__fish_seen_subcommand_from {name}'"
        for word, choices in taken.items():
            if word.startswith("--"):
                values = f" -x -a '{' '.join(choices)}'" if choices else ""
                lines.append(f"complete -c betternorm {inside} -l {word[2:]}{values}")
            else:
                lines.append(f"complete -c betternorm -f {inside} -a {word}")
    return "\n".join(lines) + "\n"


_WRITERS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
